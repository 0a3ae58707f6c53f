//! Tests of the swap file's objects, below folios.
use memfold_os::page::PageBuffer;
use memfold_os::thread::delegate_queue::DelegateQueue;
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::Handle;
use memfold_swap::location::SLOTS_MAX;
use memfold_swap::{ANCESTORS_MAX, ObjectLocation, ReadError, Swap, SwapBounds};
use memfold_testkit::disk::MemoryDisk;
use std::sync::Arc;

pub fn bounds() -> SwapBounds {
    SwapBounds {
        size_bytes: 64 << 20,
        keep_free_bytes: 0,
        remote_bytes: 0,
        mark_percent: 90,
        remote_expiry: std::time::Duration::MAX,
        limit_bytes: 64 << 20,
        run_order_max: Order::MAX,
    }
}

fn swap(disk: &MemoryDisk, encrypt: bool) -> Swap {
    Swap::new(Box::new(disk.clone()), None, encrypt, bounds()).unwrap()
}

#[test]
fn every_place_comes_back_from_its_handle() {
    for place in [
        ObjectLocation { slot: 0, offset: 0, len: 16, is_raw: false },
        ObjectLocation { slot: SLOTS_MAX - 1, offset: PAGE_SIZE - 16, len: 2 << 20, is_raw: false },
        ObjectLocation { slot: 12345, offset: 0, len: 2 << 20, is_raw: true },
    ] {
        assert_eq!(ObjectLocation::from_handle(place.handle()), Some(place));
    }
    assert_eq!(ObjectLocation::from_handle(Handle::NONE), None);
    assert_eq!(ObjectLocation::from_handle(Handle::ZERO), None);
    assert_eq!(ObjectLocation { slot: 0, offset: 4080, len: 32, is_raw: false }.slots(), 2);
}

/// Writes a raw block and reads it back.
pub fn write_raw(swap: &Swap, fill: u8) -> ObjectLocation {
    let block = Order::new(2).unwrap();
    let slot = swap.allocate(block).unwrap();
    let buffer = swap.take_write_buffer(true).unwrap();
    // SAFETY: the buffer is ours.
    unsafe {
        let bytes = &mut swap.buffer_mut(buffer)[..block.bytes()];
        bytes.fill(fill);
        swap.seal_raw(slot, bytes, block);
        let mut writes = [swap.write_from(buffer, slot, block.bytes())];
        swap.write(&mut writes);
        assert_eq!(writes[0].result, Ok(()));
    }
    swap.give_buffer_back(buffer);
    let place = ObjectLocation { slot, offset: 0, len: block.bytes(), is_raw: true };
    swap.insert(place);
    swap.release(slot, block.pages());
    place
}

pub fn read_raw(swap: &Swap, place: ObjectLocation) -> Result<Vec<u8>, ReadError> {
    let order = Order::new(2).unwrap();
    let mut pages = PageBuffer::new(order);
    // SAFETY: four pages, ours.
    unsafe { swap.read_raw(place, 1, order, pages.pages_mut()) }.map(|()| pages.bytes().to_vec())
}

#[test]
fn file_of_another_run_is_refused_and_the_error_names_the_slot() {
    let disk = MemoryDisk::default();
    let (first, second) = (swap(&disk, true), swap(&disk, true));
    let place = write_raw(&first, 7);
    assert_eq!(read_raw(&first, place), Ok(vec![7; 4 * PAGE_SIZE]));
    // The other run's slots start at the same place; its key is another.
    let theirs = write_raw(&second, 7);
    assert_eq!(theirs, place);
    let error = read_raw(&first, place).unwrap_err();
    let text = format!("{error}");
    assert!(
        text.starts_with("swap file memory-disk, slot 0 (byte 0)")
            && text.contains("not what was written"),
        "{text}"
    );
}

#[test]
fn slots_are_free_when_their_last_object_is() {
    let disk = MemoryDisk::default();
    let swap = swap(&disk, true);
    let order = Order::new(1).unwrap();
    let slot = swap.allocate(order).unwrap();
    let object = |offset: usize, len| ObjectLocation { slot, offset, len, is_raw: false };
    let places = [object(0, 3000usize.next_multiple_of(16)), object(3008, 3008)];
    places.iter().for_each(|p| swap.insert(*p));
    swap.release(slot, 2);
    assert_eq!((swap.objects(), swap.used_bytes()), (2, 8192));
    swap.free(places[0].handle());
    assert_eq!(swap.used_bytes(), 8192, "the second lies in both");
    swap.free(places[1].handle());
    assert_eq!((swap.objects(), swap.used_bytes()), (0, 0));
    swap.check().unwrap();
}

#[test]
fn the_size_is_kept() {
    let disk = MemoryDisk::default();
    let swap = swap(&disk, false);
    let mut runs = Vec::new();
    while let Some(slot) = swap.allocate(Order::MAX) {
        runs.push(slot);
    }
    assert_eq!(runs.len(), 32);
    assert_eq!(disk.bytes().len(), 64 << 20);
}

/// The same object stands for parent and child, one after the other.
#[test]
fn a_child_reads_its_parents_objects_and_writes_behind_them() {
    for encrypt in [true, false] {
        let disk = MemoryDisk::default();
        let queue = DelegateQueue::new(|| true);
        let swap = swap(&disk, encrypt).with_delegate_queue(Some(Arc::new(queue)));
        let mut all = Vec::new();
        for generation in 0..=ANCESTORS_MAX {
            assert_eq!(swap.can_lend(), generation < ANCESTORS_MAX);
            let base = swap.base();
            let fill = generation as u8 + 1;
            all.push((write_raw(&swap, fill), fill));
            let own = swap.used_bytes();
            assert!(all.last().unwrap().0.start() >= base && own == 4 * PAGE_SIZE as u64);
            for (place, fill) in &all {
                assert_eq!(read_raw(&swap, *place), Ok(vec![*fill; 4 * PAGE_SIZE]));
            }
            if !swap.can_lend() {
                assert!(!swap.begin_copy(|| true), "it is to be emptied first");
                break;
            }
            assert!(swap.begin_copy(|| true));
            // SAFETY: nobody else uses it, as in a child.
            unsafe {
                swap.allow_requests();
                swap.begin_in_child().unwrap();
                swap.end_copy(true);
            }
            swap.check().unwrap();
            assert_eq!(swap.used_bytes(), 0);
        }
        all.iter().for_each(|(place, _)| swap.free(place.handle()));
        assert_eq!((swap.objects(), swap.used_bytes()), (0, 0));
        swap.check().unwrap();
    }
}
