//! Tests of groups of slots while the process is copied.
use crate::tier::slot_group::SlotGroups;

#[test]
fn a_move_under_way_when_the_process_is_copied_comes_to_nothing() {
    let mut groups = SlotGroups::new(64).unwrap();
    let group = groups.group(1);
    (group.backed, group.written) = (0xff, 0xff);
    let first = groups.begin_demotion(1, 0xff).unwrap();
    groups.begin_copy();
    assert_eq!(groups.finish(&first, 0xff), 0);
    let group = groups.group(1);
    assert_eq!((group.remote, group.moving, group.backed), (0, 0, 0xff));
    assert_eq!(groups.garbage, [first.number], "it has been stored for nothing");
    let second = groups.begin_demotion(1, 0xff).unwrap();
    assert_eq!(groups.finish(&second, 0xff), 8);
}
