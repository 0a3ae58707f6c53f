//! The fuzz targets on mutations of valid inputs, the same ones each time. `lab/fuzz` runs them for
//! longer.
use super::fuzz;
use memfold_testkit::mutations::feed;

#[test]
fn any_bytes_are_a_session_that_gives_no_other_devices_data() {
    feed(12, fuzz::session, &fuzz::seeds().0, 600);
}

#[test]
fn any_request_bytes_are_answered_or_end_the_connection() {
    feed(12, fuzz::requests, &fuzz::seeds().1, 600);
}
