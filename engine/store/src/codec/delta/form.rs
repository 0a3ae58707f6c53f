//! The forms of the codec: which instructions encode and decode a page.
use super::layout::{self, ROOM};
use super::votes::Scratch;
use super::{avx2, avx512};
use memfold_os::units::PAGE_SIZE;
use memfold_os::vectors::{have_avx512_bytes, have_fast_bmi2};

/// A form that this processor has. Every form decodes what any form has encoded.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// AVX-512 with VBMI2: encodes in 0.8 us, decodes in 0.2.
    Avx512,
    /// AVX2 and BMI2: 1.5 us and 0.35.
    Avx2,
    /// No vector instructions: decodes only.
    Plain,
}

impl Form {
    /// Returns the fastest form.
    pub fn best() -> Form {
        match (have_avx512_bytes(), have_fast_bmi2()) {
            (true, _) => Form::Avx512,
            (_, true) => Form::Avx2,
            _ => Form::Plain,
        }
    }

    /// Returns whether it can encode.
    pub fn encodes(self) -> bool {
        self != Form::Plain
    }

    /// Encodes the page at `page` to `to`. Returns the length, or `None` if the page is too dense, or
    /// the form can't encode.
    ///
    /// # Safety
    /// - `page` is readable for a page, and no thread writes there meanwhile.
    /// - `to` is writable for [`ROOM`] bytes, does not overlap the page, and no other thread touches
    ///   it meanwhile.
    #[inline]
    pub unsafe fn encode(
        self,
        scratch: &mut Scratch,
        page: *const u8,
        to: *mut u8,
    ) -> Option<usize> {
        const _: () = assert!(ROOM >= layout::PACKED_MAX);
        match self {
            // SAFETY: the processor has the instructions of its forms; the caller vouches for both
            // places.
            Form::Avx512 => unsafe { avx512::encode(scratch, page, to) },
            // SAFETY: the processor has the instructions of this form; the caller vouches for both places.
            Form::Avx2 => unsafe { avx2::encode(scratch, page, to) },
            Form::Plain => None,
        }
    }

    /// Decodes a page. Returns `false` if the payload is damaged. Any bytes are allowed.
    ///
    /// # Safety
    /// - `page` is writable for a page, does not overlap the payload, and no other thread touches it
    ///   meanwhile.
    #[inline]
    pub unsafe fn decode(self, payload: &[u8], page: *mut u8) -> bool {
        match self {
            // SAFETY: the processor has the instructions of its forms; the payload is borrowed; the
            // caller vouches for the page.
            Form::Avx512 => unsafe { avx512::decode(payload.as_ptr(), payload.len(), page) },
            // SAFETY: the processor has the instructions of this form; the payload is borrowed; the caller
            // vouches for the page.
            Form::Avx2 => unsafe { avx2::decode(payload.as_ptr(), payload.len(), page) },
            // SAFETY: the caller vouches for the page, which is borrowed only for this call.
            Form::Plain => unsafe { layout::decode(payload, &mut *page.cast::<[u8; PAGE_SIZE]>()) },
        }
    }

    /// Returns all forms of this processor.
    #[cfg(any(test, fuzzing))]
    pub fn all() -> impl Iterator<Item = Form> {
        let forms = [
            have_avx512_bytes().then_some(Form::Avx512),
            have_fast_bmi2().then_some(Form::Avx2),
            Some(Form::Plain),
        ];
        forms.into_iter().flatten()
    }
}
