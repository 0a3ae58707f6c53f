//! Checks for tests and fuzzers: all forms agree, whatever the page or the payload.
use super::form::Form;
use super::layout::ROOM;
use super::votes::Scratch;
use alloc::boxed::Box;
use alloc::vec::Vec;
use memfold_os::units::PAGE_SIZE;

const CANARY: u8 = 0xa7;

/// Encodes a page with every form. Returns the payloads.
///
/// # Panics
/// If a decoder of any form gives other bytes than the page.
pub(crate) fn round_trip(page: &[u8; PAGE_SIZE]) -> Vec<Vec<u8>> {
    let mut payloads = Vec::new();
    for form in Form::all() {
        let mut scratch = Box::new(Scratch::new());
        let mut output = alloc::vec![CANARY; ROOM];
        // SAFETY: the page is borrowed, and the output has room.
        let size = unsafe { form.encode(&mut scratch, page.as_ptr(), output.as_mut_ptr()) };
        let Some(size) = size else { continue };
        let payload = output[..size].to_vec();
        assert!(decode_all(&payload).is_some_and(|back| back == page[..]), "by {form:?}");
        payloads.push(payload);
    }
    payloads
}

/// Decodes any bytes with every form. Returns the page, `None` if they are damaged.
///
/// # Panics
/// If two forms disagree, or a byte beside the page is written.
pub(crate) fn decode_all(payload: &[u8]) -> Option<Vec<u8>> {
    let mut results = Form::all().map(|form| {
        // The payload has a box of its own length, so that a sanitizer detects a read past it.
        let payload: Box<[u8]> = payload.into();
        let mut buffer = alloc::vec![CANARY; 3 * PAGE_SIZE];
        // SAFETY: the page in the middle of the buffer is writable, and only this function has it.
        let is_whole = unsafe { form.decode(&payload, buffer.as_mut_ptr().add(PAGE_SIZE)) };
        let (page, after) = buffer[PAGE_SIZE..].split_at(PAGE_SIZE);
        let beside = buffer[..PAGE_SIZE].iter().chain(after);
        assert!(beside.into_iter().all(|byte| *byte == CANARY), "{form:?} wrote beside the page");
        let is_untouched = || page.iter().all(|byte| *byte == CANARY);
        assert!(is_whole || is_untouched(), "{form:?} wrote a damaged page");
        (form, is_whole.then(|| page.to_vec()))
    });
    let (_, page) = results.next()?;
    for (form, other) in results {
        assert!(other == page, "{form:?} disagrees");
    }
    page
}
