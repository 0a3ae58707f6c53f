//! Size classes: the slot size of an object, and the pages of a span of that class.
//!
//! A slot is at most 1/16 larger than its object (16 bytes up to 512), up to 64 KiB. Finer steps
//! would save there but lose more in partly used spans, until a pool is far above 256 MiB (measured
//! with the churn test). The span length of a class is the shortest one that leaves at most 1/32 of
//! the span unused, or the best one of up to 32 pages. Neighbouring classes that would cut the same
//! span into the same number of slots are merged. Above 64 KiB a span holds one object and has
//! exactly the pages that it needs.
use memfold_os::units::{MAX_BYTES, PAGE_SIZE};

/// Most slots in a span: the bits of the span's bitmap.
pub(crate) const SLOTS_MAX: usize = 128;
/// Bytes before the payload in a slot that shares its span: the index of the entry that owns it.
pub(crate) const OWNER_BYTES: usize = 4;

const SLOT_MIN: usize = 32;
/// Largest size up to which slot sizes grow by 16 bytes.
const FINE_MAX: usize = 512;
/// Largest size up to which spans are shared and slot sizes grow by 1/16 of a power of two. Larger
/// sizes grow by whole pages.
const SHARED_MAX: usize = 64 << 10;
const STEP_SHIFT: u32 = 4;
const STEPS_PER_DOUBLING: usize = 1 << STEP_SHIFT;
const SPAN_PAGES_MAX: usize = 32;
/// Unused bytes per 2^20 of a span that are acceptable: 1/32. Less waste would need longer spans,
/// and lose more in partly used ones.
const WASTE_MAX: usize = 1 << 15;

const FINE_STEPS: usize = FINE_MAX / 16;
const SHARED_STEPS: usize =
    FINE_STEPS + STEPS_PER_DOUBLING * (SHARED_MAX / FINE_MAX).ilog2() as usize;
const STEPS: usize = SHARED_STEPS + (MAX_BYTES - SHARED_MAX) / PAGE_SIZE;

/// One size class.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub(crate) struct SizeClass {
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Pages of a span.
    pub pages: u16,
    /// Slots of a span.
    pub slots: u16,
}

impl SizeClass {
    /// Returns whether the object has its own span. Its owner is then noted in the span, and the
    /// payload fills the slot.
    pub const fn is_sole(&self) -> bool {
        self.slots == 1
    }

    /// Returns the offset of the payload in its slot.
    pub const fn payload_offset(&self) -> usize {
        if self.is_sole() { 0 } else { OWNER_BYTES }
    }

    /// Returns the longest payload.
    pub const fn payload_max(&self) -> usize {
        self.slot_bytes as usize - self.payload_offset()
    }

    pub const fn span_bytes(&self) -> usize {
        self.pages as usize * PAGE_SIZE
    }
}

/// The number of classes.
pub(crate) const COUNT: usize = count();
/// All classes, smallest first.
pub(crate) static CLASSES: [SizeClass; COUNT] = table();
static CLASS_OF_STEP: [u16; STEPS] = class_of_step();

/// Returns the class of an object of `len` payload bytes. A few instructions and two table
/// look-ups.
///
/// # Panics
/// If `len` is 0 or above 2 MiB.
#[inline]
pub(crate) fn of_payload(len: usize) -> usize {
    assert!(len > 0 && len <= MAX_BYTES);
    let class = CLASS_OF_STEP[step_of(len)] as usize;
    if CLASSES[class].is_sole() {
        return class;
    }
    CLASS_OF_STEP[step_of(len + OWNER_BYTES)] as usize
}

const fn step_of(size: usize) -> usize {
    if size <= FINE_MAX {
        let size = if size < SLOT_MIN { SLOT_MIN } else { size };
        size.div_ceil(16) - 1
    } else if size <= SHARED_MAX {
        let below = size - 1;
        let exponent = below.ilog2();
        let doubling = (exponent - FINE_MAX.ilog2()) as usize;
        FINE_STEPS
            + STEPS_PER_DOUBLING * doubling
            + ((below >> (exponent - STEP_SHIFT)) % STEPS_PER_DOUBLING)
    } else {
        SHARED_STEPS + size.div_ceil(PAGE_SIZE) - SHARED_MAX / PAGE_SIZE - 1
    }
}

/// Returns the largest size of a step.
const fn size_of_step(step: usize) -> usize {
    if step < FINE_STEPS {
        (step + 1) * 16
    } else if step < SHARED_STEPS {
        let exponent = FINE_MAX.ilog2() as usize + (step - FINE_STEPS) / STEPS_PER_DOUBLING;
        (1 << exponent)
            + (((step - FINE_STEPS) % STEPS_PER_DOUBLING + 1) << (exponent - STEP_SHIFT as usize))
    } else {
        SHARED_MAX + (step - SHARED_STEPS + 1) * PAGE_SIZE
    }
}

/// Returns the span for slots of `size` bytes, before the slot size is widened.
const fn span_for(size: usize) -> SizeClass {
    let least = size.div_ceil(PAGE_SIZE);
    let mut best = SizeClass { slot_bytes: size as u32, pages: least as u16, slots: 1 };
    if size > SHARED_MAX {
        return best;
    }
    let mut best_waste = usize::MAX;
    let mut pages = least;
    while pages <= SPAN_PAGES_MAX {
        let span = pages * PAGE_SIZE;
        let slots = if span / size < SLOTS_MAX { span / size } else { SLOTS_MAX };
        // Unused bytes per 2^20 of the span.
        let waste = ((span - slots * size) << 20) / span;
        if waste < best_waste {
            best_waste = waste;
            best.pages = pages as u16;
            best.slots = slots as u16;
        }
        if best_waste <= WASTE_MAX {
            break;
        }
        pages += 1;
    }
    best
}

const fn same_cut(a: &SizeClass, b: &SizeClass) -> bool {
    a.pages == b.pages && a.slots == b.slots
}

/// Returns whether step `step` is the last one of its class.
const fn ends_class(step: usize) -> bool {
    step + 1 == STEPS || !same_cut(&span_for(size_of_step(step)), &span_for(size_of_step(step + 1)))
}

const FIRST_STEP: usize = SLOT_MIN / 16 - 1;

const fn count() -> usize {
    let (mut step, mut classes) = (FIRST_STEP, 0);
    while step < STEPS {
        classes += ends_class(step) as usize;
        step += 1;
    }
    classes
}

const fn table() -> [SizeClass; COUNT] {
    let mut classes = [SizeClass { slot_bytes: 0, pages: 0, slots: 0 }; COUNT];
    let (mut step, mut at) = (FIRST_STEP, 0);
    while step < STEPS {
        if ends_class(step) {
            let mut class = span_for(size_of_step(step));
            // Slots share the rest, in steps that keep payloads aligned.
            let widest = class.span_bytes() / class.slots as usize / 16 * 16;
            class.slot_bytes = widest as u32;
            classes[at] = class;
            at += 1;
        }
        step += 1;
    }
    classes
}

const fn class_of_step() -> [u16; STEPS] {
    let mut map = [0; STEPS];
    let (mut step, mut at) = (FIRST_STEP, 0);
    while step < STEPS {
        map[step] = at;
        at += ends_class(step) as u16;
        step += 1;
    }
    map
}

const _: () = assert!(COUNT < u16::MAX as usize, "a span notes its class in 16 bits");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_fits_its_class_with_little_waste() {
        let mut last = 0;
        for len in (1..70_000).chain((70_000..=MAX_BYTES).step_by(509)).chain([MAX_BYTES]) {
            let class = of_payload(len);
            assert!(class >= last, "classes grow with the length");
            last = class;
            let class = CLASSES[class];
            assert!(class.payload_max() >= len, "{len} in {class:?}");
            assert!(class.slots as usize * class.slot_bytes as usize <= class.span_bytes());
            if len >= 256 {
                let share = class.span_bytes() as f64 / class.slots as f64;
                let bound = if len > SHARED_MAX { len as f64 + 4095.0 } else { len as f64 * 1.12 };
                assert!(share <= bound, "{len} costs {share} in {class:?}");
            }
        }
        assert_eq!(last, COUNT - 1);
    }

    #[test]
    fn the_mean_waste_is_low() {
        let (mut held_bytes, mut stored_bytes) = (0.0, 0.0);
        for len in 1000..60_000 {
            let class = CLASSES[of_payload(len)];
            held_bytes += class.span_bytes() as f64 / class.slots as f64 / len as f64;
            stored_bytes += 1.0;
        }
        println!("{COUNT} classes, mean cost {:.4}", held_bytes / stored_bytes);
        assert!(held_bytes / stored_bytes < 1.04);
    }

    #[test]
    fn a_raw_block_takes_exactly_its_pages() {
        for order in 0..=9 {
            let class = CLASSES[of_payload(PAGE_SIZE << order)];
            assert!(class.is_sole());
            assert_eq!(class.span_bytes(), PAGE_SIZE << order);
        }
    }
}
