//! Static memory of the program and its libraries, and what the kernel keeps addresses of.
//!
//! Memory from before the engine is not folded, because the kernel or the dynamic linker may use
//! any of it: thread control blocks, robust lists, the heap of the linker. Zero-initialised static
//! memory (.bss) is an exception: the program headers say where it is, so it has nothing else in
//! it. It may be most of a program, and no call maps it. Initialised static memory (.data) belongs
//! to a private file mapping, which userfaultfd doesn't register.
//!
//! The .bss of memfold's own library is not folded: the engine touches it with locks held. The gate
//! calls no function of libc, so the .bss of libc is like any other.
use crate::marks::ranges::RangeSet;
use core::ffi::{c_int, c_void};
use core::ops::ControlFlow::Continue;
use core::ops::Range;
use memfold::known::TOP;
use memfold_gate::image;
use memfold_os::maps::each_area;
use memfold_os::sync::Mutex;
use memfold_os::units::PAGE_SIZE;

/// Smaller .bss is left alone.
const SMALL_BYTES: usize = 64 << 10;

/// The memory at the start, as [`note`] finds it.
struct StaticMemory {
    /// Static data that is written to, if only before the program begins, bytes.
    bytes: usize,
    /// Zero-initialised static memory that can be folded.
    zeros: RangeSet,
    /// Memory that the kernel may write to at any time, and that the gate reported before there was
    /// an engine.
    kept: RangeSet,
}

static MEMORY: Mutex<StaticMemory> = Mutex::new(StaticMemory::new());

impl StaticMemory {
    const fn new() -> StaticMemory {
        StaticMemory { bytes: 0, zeros: RangeSet::new(), kept: RangeSet::new() }
    }

    /// Adds zero-initialised memory, unless it is small or memfold's own.
    fn add_zeros(&mut self, zeros: Range<usize>, own: &Range<usize>) {
        let is_own = zeros.start < own.end && own.start < zeros.end;
        if !is_own && zeros.start < zeros.end && zeros.len() >= SMALL_BYTES && zeros.end <= TOP {
            self.zeros.add(zeros);
        }
    }

    /// Adds a segment of an object that is loaded at `base`.
    fn add_segment(&mut self, base: usize, segment: &libc::Elf64_Phdr, own: &Range<usize>) {
        if segment.p_type == libc::PT_LOAD && segment.p_flags & libc::PF_W != 0 {
            self.bytes += segment.p_memsz as usize;
            self.add_zeros(zeros_of(base, segment), own);
        }
    }
}

/// Returns the pages of a segment that hold only zero-initialised memory.
fn zeros_of(base: usize, segment: &libc::Elf64_Phdr) -> Range<usize> {
    let start = base.wrapping_add(segment.p_vaddr as usize);
    let page = |len: u64| start.saturating_add(len as usize).next_multiple_of(PAGE_SIZE);
    page(segment.p_filesz)..page(segment.p_memsz)
}

/// Returns the addresses of memfold's own object; all addresses if its headers can't be parsed.
fn own_image() -> Range<usize> {
    let Some(segments) = image::segments() else { return 0..usize::MAX };
    let loaded = || segments.iter().filter(|each| each.p_type == libc::PT_LOAD);
    let first = loaded().next().map_or(0, |each| each.p_vaddr as usize);
    let last = loaded().map(|each| (each.p_vaddr + each.p_memsz) as usize).max().unwrap_or(first);
    image::start()..image::start() + (last - first)
}

/// The type of libc's `dl_iterate_phdr`.
type EachObject = unsafe extern "C" fn(
    Option<unsafe extern "C" fn(*mut libc::dl_phdr_info, libc::size_t, *mut c_void) -> c_int>,
    *mut c_void,
) -> c_int;

/// Returns libc's `dl_iterate_phdr`, or `None` if there is no libc in this process.
fn each_object() -> Option<EachObject> {
    let place = weak_address!("dl_iterate_phdr");
    // SAFETY: it is 0, which is `None`, or the address of that function.
    unsafe { core::mem::transmute::<usize, Option<EachObject>>(place) }
}

/// Notes the static memory of the program and its libraries, and returns its bytes. The constructor
/// calls it, before the program begins.
pub fn note() -> usize {
    let own = own_image();
    let found = match each_object() {
        Some(each_object) => of_objects(each_object, own),
        None => of_map(own),
    };
    let bytes = found.bytes;
    *MEMORY.lock() = found;
    bytes
}

/// Returns the static memory of all objects that the dynamic linker has loaded.
fn of_objects(each_object: EachObject, own: Range<usize>) -> StaticMemory {
    unsafe extern "C" fn add(
        about: *mut libc::dl_phdr_info,
        _: libc::size_t,
        found: *mut c_void,
    ) -> c_int {
        // SAFETY: libc passes the description of a loaded object, which is valid during the call.
        // `found` is the pair that the caller passed, and only this call uses it.
        let (about, (found, own)) =
            unsafe { (&*about, &mut *found.cast::<(StaticMemory, Range<usize>)>()) };
        // SAFETY: `dlpi_phdr` points to `dlpi_phnum` program headers of a loaded object, which
        // stays loaded during the call.
        let headers =
            unsafe { core::slice::from_raw_parts(about.dlpi_phdr, about.dlpi_phnum.into()) };
        headers.iter().for_each(|each| found.add_segment(about.dlpi_addr as usize, each, own));
        0
    }
    let mut found = (StaticMemory::new(), own);
    // SAFETY: the function has the type that libc expects, and keeps none of its arguments. `found`
    // lives until the call returns.
    unsafe { each_object(Some(add), (&raw mut found).cast()) };
    found.0
}

/// Returns the static memory of a program that the library has loaded, by the kernel's map. Only
/// the program is there yet.
fn of_map(own: Range<usize>) -> StaticMemory {
    let (mut found, mut end) = (StaticMemory::new(), 0);
    // Without a map nothing is known of them. Then an engine can't be made later either.
    let _ = each_area(|area| {
        // Behind a file's data lies memory that is zeros in the beginning.
        let is_zeros = area.inode == 0 && area.start == end && area.name().is_empty();
        if area.writable && area.private && (area.inode != 0 || is_zeros) {
            found.bytes += area.len();
            end = area.end;
            if is_zeros {
                found.add_zeros(area.start..area.end, &own);
            }
        }
        Continue(())
    });
    found
}

/// Records memory of a process without an engine that the kernel may write to at any time.
pub fn keep(range: Range<usize>) {
    MEMORY.lock().kept.add(range);
}

/// Returns the parts of `present`, which is there before the engine, that can't be folded.
pub fn never_folded(present: Range<usize>) -> RangeSet {
    let memory = MEMORY.lock();
    let mut never = RangeSet::new();
    memory.zeros.cut_out_of([present.clone()].into()).into_iter().for_each(|part| never.add(part));
    memory.kept.within(&present).into_iter().for_each(|part| never.add(part));
    never
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: Range<usize> = 0x700000..0x800000;

    fn segment(start: u64, in_file: u64, in_memory: u64) -> libc::Elf64_Phdr {
        libc::Elf64_Phdr {
            p_type: libc::PT_LOAD,
            p_flags: libc::PF_R | libc::PF_W,
            p_offset: 0,
            p_vaddr: start,
            p_paddr: start,
            p_filesz: in_file,
            p_memsz: in_memory,
            p_align: 4096,
        }
    }

    fn zeros(base: usize, segments: &[libc::Elf64_Phdr]) -> Vec<Range<usize>> {
        let mut found = StaticMemory::new();
        segments.iter().for_each(|each| found.add_segment(base, each, &OWN));
        found.zeros.take()
    }

    #[test]
    fn zeros_begin_at_the_first_page_without_bytes_of_the_file() {
        let all = zeros(0x100000, &[segment(0x3123, 0x1000, 0x21000)]);
        assert_eq!(all, [0x105000..0x125000]);
    }

    #[test]
    fn small_constant_and_own_zeros_are_left_alone() {
        assert!(zeros(0, &[segment(0x3000, 0x1000, 0x10000)]).is_empty(), "under 64 KiB");
        assert!(zeros(OWN.start, &[segment(0x3000, 0x1000, 0x40000)]).is_empty(), "memfold's own");
        let constant = libc::Elf64_Phdr { p_flags: libc::PF_R, ..segment(0x3000, 0, 0x40000) };
        let of_threads = libc::Elf64_Phdr { p_type: libc::PT_TLS, ..segment(0x3000, 0, 0x40000) };
        assert!(zeros(0, &[constant, of_threads]).is_empty());
        assert!(zeros(0, &[segment(0x3000, 0x40000, 0x40000)]).is_empty(), "no zeros");
    }

    #[test]
    fn own_image_holds_own_code_and_data() {
        let own = own_image();
        assert!(own.contains(&(own_image as *const () as usize)), "{own:x?}");
        assert!(own.contains(&(&raw const MEMORY as usize)), "{own:x?}");
        assert!(own.end < usize::MAX);
    }
}
