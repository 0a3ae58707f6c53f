//! The vector instructions of the processor, and whether the system saves their registers.
use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
// `core`'s, never a model checker's, because models run side by side and share statics.
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

const KNOWN: u8 = 1;
const AVX2: u8 = 2;
const VPCLMULQDQ: u8 = 4;
const AVX512F: u8 = 8;

/// Returns whether AVX2 may be used. The first of these functions queries the processor.
#[inline]
pub fn have_avx2() -> bool {
    have(AVX2)
}

/// Returns whether VPCLMULQDQ may be used, with AVX2 and PCLMULQDQ.
#[inline]
pub fn have_vpclmulqdq() -> bool {
    have(VPCLMULQDQ)
}

/// Returns whether AVX-512F may be used.
#[inline]
pub fn have_avx512() -> bool {
    have(AVX512F)
}

#[inline]
fn have(what: u8) -> bool {
    static FOUND: AtomicU8 = AtomicU8::new(0);
    let mut features = FOUND.load(Relaxed);
    if features == 0 {
        features = detect();
        FOUND.store(features, Relaxed);
    }
    features & what != 0
}

#[cold]
fn detect() -> u8 {
    const PCLMULQDQ: u32 = 1 << 1;
    const XSAVE_AND_AVX: u32 = 1 << 27 | 1 << 28;
    // Registers that the system saves: those of 16 and 32 bytes; also those of 64, with their
    // masks.
    const TO_32: u64 = 0x06;
    const TO_64: u64 = 0xe6;
    let base = __cpuid(1).ecx;
    if __cpuid(0).eax < 7 || base & XSAVE_AND_AVX != XSAVE_AND_AVX {
        return KNOWN;
    }
    // SAFETY: the OSXSAVE bit means that the instruction exists and is permitted.
    let state_bits = unsafe { saved_by_system() };
    let more = __cpuid_count(7, 0);
    let mut features = KNOWN;
    if state_bits & TO_32 == TO_32 && more.ebx & 1 << 5 != 0 {
        features |= AVX2;
        if base & PCLMULQDQ != 0 && more.ecx & 1 << 10 != 0 {
            features |= VPCLMULQDQ;
        }
        if state_bits & TO_64 == TO_64 && more.ebx & 1 << 16 != 0 {
            features |= AVX512F;
        }
    }
    features
}

#[target_feature(enable = "xsave")]
fn saved_by_system() -> u64 {
    // SAFETY: register 0 always exists where XGETBV does.
    unsafe { _xgetbv(0) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn it_is_what_the_standard_library_finds() {
        assert_eq!(super::have_avx2(), std::is_x86_feature_detected!("avx2"));
        assert_eq!(super::have_vpclmulqdq(), std::is_x86_feature_detected!("vpclmulqdq"));
        assert_eq!(super::have_avx512(), std::is_x86_feature_detected!("avx512f"));
    }
}
