//! The vector instructions of the processor, and whether the system saves their registers.
use core::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
// `core`'s, never a model checker's, because models run side by side and share statics.
use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

const KNOWN: u8 = 1;
const AVX2: u8 = 2;
const VPCLMULQDQ: u8 = 4;
const AVX512F: u8 = 8;
const FAST_BMI2: u8 = 16;
const AVX512_BYTES: u8 = 32;
const WIDE_MASKS: u8 = 64;

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

/// Returns whether AVX2, BMI1, BMI2 and POPCNT may be used, and PEXT and PDEP are fast. On AMD's Zen 1
/// and 2 they take some hundred cycles.
#[inline]
pub fn have_fast_bmi2() -> bool {
    have(FAST_BMI2)
}

/// Returns whether there are mask registers of 64 bits (AVX-512BW).
#[inline]
pub fn have_wide_masks() -> bool {
    have(WIDE_MASKS)
}

/// Returns whether AVX-512 may be used with all that handles bytes: F, BW, DQ, VL, VBMI, VBMI2, BITALG
/// and VPOPCNTDQ, with BMI1, BMI2 and POPCNT.
#[inline]
pub fn have_avx512_bytes() -> bool {
    have(AVX512_BYTES)
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
    const POPCNT: u32 = 1 << 23;
    const BMI: u32 = 1 << 3 | 1 << 8;
    const BW: u32 = 1 << 30;
    // DQ, BW and VL; VBMI, VBMI2, BITALG and VPOPCNTDQ.
    const BYTES_EBX: u32 = 1 << 17 | BW | 1 << 31;
    const BYTES_ECX: u32 = 1 << 1 | 1 << 6 | 1 << 12 | 1 << 14;
    // Each question costs some 10 us in a virtual machine.
    let (vendor, version) = (__cpuid(0), __cpuid(1));
    let base = version.ecx;
    if vendor.eax < 7 || base & XSAVE_AND_AVX != XSAVE_AND_AVX {
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
            if more.ebx & BW != 0 {
                features |= WIDE_MASKS;
            }
        }
        if base & POPCNT != 0 && more.ebx & BMI == BMI {
            if !has_slow_pext(vendor.ebx, version.eax) {
                features |= FAST_BMI2;
            }
            let has_bytes = more.ebx & BYTES_EBX == BYTES_EBX && more.ecx & BYTES_ECX == BYTES_ECX;
            if features & AVX512F != 0 && has_bytes {
                features |= AVX512_BYTES;
            }
        }
    }
    features
}

/// Returns whether PEXT is done in microcode: by AMD's processors before Zen 3, and by Hygon's. `vendor`
/// has the first letters of the name, and `version` the family.
fn has_slow_pext(vendor: u32, version: u32) -> bool {
    const AMD: u32 = u32::from_le_bytes(*b"Auth");
    const HYGON: u32 = u32::from_le_bytes(*b"Hygo");
    const ZEN_3: u32 = 0x19;
    let family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
    match vendor {
        AMD => family < ZEN_3,
        HYGON => true,
        _ => false,
    }
}

#[target_feature(enable = "xsave")]
fn saved_by_system() -> u64 {
    // SAFETY: register 0 always exists where XGETBV does.
    unsafe { _xgetbv(0) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn pext_is_slow_before_zen_3() {
        let name = |letters: &[u8; 4]| u32::from_le_bytes(*letters);
        let (zen_2, zen_3) = (0x0083_0f10, 0x00a0_0f11);
        assert!(super::has_slow_pext(name(b"Auth"), zen_2));
        assert!(!super::has_slow_pext(name(b"Auth"), zen_3));
        assert!(
            super::has_slow_pext(name(b"Hygo"), zen_3)
                && !super::has_slow_pext(name(b"Genu"), 0x306c3)
        );
    }

    #[test]
    fn it_is_what_the_standard_library_finds() {
        assert_eq!(super::have_avx2(), std::is_x86_feature_detected!("avx2"));
        assert_eq!(super::have_vpclmulqdq(), std::is_x86_feature_detected!("vpclmulqdq"));
        assert_eq!(super::have_avx512(), std::is_x86_feature_detected!("avx512f"));
        assert_eq!(super::have_wide_masks(), std::is_x86_feature_detected!("avx512bw"));
        let has_bmi2 = std::is_x86_feature_detected!("bmi1")
            && std::is_x86_feature_detected!("bmi2")
            && std::is_x86_feature_detected!("popcnt");
        assert_eq!(
            super::have_fast_bmi2(),
            has_bmi2
                && std::is_x86_feature_detected!("avx2")
                && !super::has_slow_pext(super::__cpuid(0).ebx, super::__cpuid(1).eax)
        );
        assert_eq!(
            super::have_avx512_bytes(),
            has_bmi2
                && std::is_x86_feature_detected!("avx512f")
                && std::is_x86_feature_detected!("avx512bw")
                && std::is_x86_feature_detected!("avx512dq")
                && std::is_x86_feature_detected!("avx512vl")
                && std::is_x86_feature_detected!("avx512vbmi")
                && std::is_x86_feature_detected!("avx512vbmi2")
                && std::is_x86_feature_detected!("avx512bitalg")
                && std::is_x86_feature_detected!("avx512vpopcntdq")
        );
    }
}
