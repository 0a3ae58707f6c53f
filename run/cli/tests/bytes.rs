//! The preload library's own `memcpy`, `memmove`, `memset` and `memcmp`. This test program also
//! uses them itself.
use memfold_testkit::random::Random;
use std::ffi::{c_int, c_void};

#[path = "../../preload/src/bytes.rs"]
mod bytes;

unsafe extern "C" {
    fn memcpy(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void;
    fn memmove(to: *mut c_void, from: *const c_void, bytes: usize) -> *mut c_void;
    fn memset(to: *mut c_void, byte: c_int, bytes: usize) -> *mut c_void;
    fn memcmp(a: *const c_void, b: *const c_void, bytes: usize) -> c_int;
    fn bcmp(a: *const c_void, b: *const c_void, bytes: usize) -> c_int;
    fn strlen(text: *const c_void) -> usize;
}

const LEN: usize = 4096;

/// Returns random unaligned offsets with lengths, most of them short.
fn cases(random: &mut Random) -> Vec<(usize, usize, usize)> {
    let near: Vec<_> =
        (0..700).flat_map(|len| [(100, 100 + len % 80, len), (180, 100, len)]).collect();
    let mut more = Vec::new();
    for _ in 0..20_000 {
        let most = 1 << random.below(11);
        let len = random.below(most);
        let mut at = || random.below(LEN - len);
        more.push((at(), at(), len));
    }
    more.extend(near);
    more
}

fn filled(random: &mut Random) -> Vec<u8> {
    (0..LEN).map(|_| random.below(256) as u8).collect()
}

#[test]
fn copies_are_those_of_single_bytes() {
    let mut random = Random::new(1);
    let (from, mut to) = (filled(&mut random), filled(&mut random));
    for (a, b, len) in cases(&mut random) {
        let mut expected = to.clone();
        (0..len).for_each(|n| expected[b + n] = from[a + n]);
        // SAFETY: both buffers have at least `len` bytes from their offsets on.
        let result = unsafe { memcpy(to[b..].as_mut_ptr().cast(), from[a..].as_ptr().cast(), len) };
        assert!(to.iter().eq(&expected) && result == to[b..].as_mut_ptr().cast(), "{a} {b} {len}");
        // Source and destination overlap.
        let bytes: Vec<u8> = (0..len).map(|n| to[a + n]).collect();
        (0..len).for_each(|n| expected[b + n] = bytes[n]);
        // SAFETY: both ranges lie within the buffer.
        unsafe { memmove(to.as_mut_ptr().add(b).cast(), to.as_ptr().add(a).cast(), len) };
        assert!(to.iter().eq(&expected), "within itself: {a} {b} {len}");
    }
}

#[test]
fn filling_and_comparing_are_those_of_single_bytes() {
    let mut random = Random::new(2);
    let mut to = filled(&mut random);
    for (a, b, len) in cases(&mut random) {
        let (byte, mut expected) = (random.below(256) as u8, to.clone());
        (0..len).for_each(|n| expected[b + n] = byte);
        // SAFETY: the buffer has at least `len` bytes from its offset on.
        let result = unsafe { memset(to[b..].as_mut_ptr().cast(), byte.into(), len) };
        assert!(to.iter().eq(&expected) && result == to[b..].as_mut_ptr().cast(), "{b} {len}");
        let other = (0..len).map(|n| to[a + n]).collect::<Vec<u8>>();
        let mut copy = other.clone();
        for at in [0, len / 2, len.saturating_sub(1)] {
            let comparison = |changed: &[u8]| {
                // SAFETY: all ranges lie within their buffers.
                let (order, differ) = unsafe {
                    let (a, b) = (changed.as_ptr().cast(), other.as_ptr().cast());
                    (memcmp(a, b, len), bcmp(a, b, len))
                };
                (order.signum(), differ != 0)
            };
            assert_eq!(comparison(&copy), (0, false));
            if at < len && other[at] > 0 {
                copy[at] = random.below(other[at].into()) as u8;
                assert_eq!(comparison(&copy), (-1, true), "{at} of {len}");
                copy[at] = other[at];
            }
        }
    }
}

#[test]
fn length_of_a_text_is_where_its_zero_is() {
    for len in 0..300 {
        let mut text = vec![7u8; len];
        text.extend([0, 7, 0]);
        // SAFETY: the text ends with a zero.
        assert_eq!(unsafe { strlen(text.as_ptr().cast()) }, len);
    }
}
