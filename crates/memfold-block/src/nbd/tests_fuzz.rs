//! The fuzz targets on mutations of good inputs, the same ones each time. `fuzz/` runs them for longer.
use super::fuzz;
use crate::mutations::feed;

#[test]
fn any_bytes_are_a_session_that_gives_no_other_devices_data() {
    feed(fuzz::session, &fuzz::seeds().0, 600);
}

#[test]
fn any_bytes_are_requests_that_are_answered_or_end_the_connection() {
    feed(fuzz::requests, &fuzz::seeds().1, 600);
}
