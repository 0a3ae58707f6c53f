//! Static memory of the program and its libraries, and what the kernel keeps addresses of.
//!
//! Memory from before the program is not folded, because the kernel or the dynamic linker may use
//! any of it: thread control blocks, robust lists, the heap of the linker. What a program maps
//! before it has an engine is noted, and can be folded. Zero-initialised static
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
use memfold_engine::known::TOP;
use memfold_gate::image;
use memfold_os::maps::each_area;
use memfold_os::sync::Mutex;
use memfold_os::units::PAGE_SIZE;

/// The advice that installs guard pages (Linux 6.13).
const MADV_GUARD_INSTALL: i32 = 102;
/// Smaller .bss is left alone.
const SMALL_BYTES: usize = 64 << 10;

/// The memory at the start, as [`note`] finds it.
struct StaticMemory {
    /// Static data that is written to, if only before the program begins, bytes.
    bytes: usize,
    /// Zero-initialised static memory that can be folded.
    zeros: RangeSet,
    /// Memory that the program has mapped since.
    mapped: RangeSet,
    /// The program's heap from here on is of that kind too; 0 before [`begin`].
    heap: usize,
    /// Memory that the kernel may write to at any time, and that the gate reported before there was
    /// an engine.
    kept: RangeSet,
}

static MEMORY: Mutex<StaticMemory> = Mutex::new(StaticMemory::new());

impl StaticMemory {
    const fn new() -> StaticMemory {
        StaticMemory {
            bytes: 0,
            zeros: RangeSet::new(),
            mapped: RangeSet::new(),
            heap: 0,
            kept: RangeSet::new(),
        }
    }

    /// Adds zero-initialised memory, unless it is small or memfold's own.
    fn add_zeros(&mut self, zeros: Range<usize>, own: &Range<usize>) {
        let is_own = zeros.start < own.end && own.start < zeros.end;
        if !is_own && zeros.start < zeros.end && zeros.len() >= SMALL_BYTES && zeros.end <= TOP {
            self.zeros.add(zeros);
        }
    }

    fn note_call(
        &mut self,
        nr: i64,
        args: &[usize; 6],
        pages: &dyn Fn(usize, usize) -> Range<usize>,
        made: usize,
    ) {
        let [start, len, ..] = *args;
        match nr {
            libc::SYS_mmap => {
                let (flags, new) = (args[3] as i32, pages(made, len));
                let is_stack = flags & (libc::MAP_STACK | libc::MAP_GROWSDOWN) != 0;
                self.mapped.remove(&new);
                let is_anonymous = flags & libc::MAP_ANONYMOUS != 0;
                if flags & libc::MAP_TYPE == libc::MAP_PRIVATE && is_anonymous && !is_stack {
                    self.mapped.add(new);
                }
            }
            libc::SYS_mremap => {
                let old = pages(start, len);
                let was_mapped = len > 0 && self.mapped.cut_out_of([old.clone()].into()).is_empty();
                let new = pages(made, args[2]);
                self.mapped.remove(&old);
                self.mapped.remove(&new);
                if was_mapped {
                    self.mapped.add(new);
                }
            }
            libc::SYS_brk if made > self.heap => {
                self.mapped.add(pages(self.heap, made - self.heap))
            }
            libc::SYS_munmap => self.mapped.remove(&pages(start, len)),
            // The engine would not know of these guards.
            libc::SYS_madvise if args[2] as i32 == MADV_GUARD_INSTALL => {
                self.mapped.remove(&pages(start, len));
            }
            _ => {}
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
    let load_segments = || segments.iter().filter(|each| each.p_type == libc::PT_LOAD);
    let first = load_segments().next().map_or(0, |each| each.p_vaddr as usize);
    let last =
        load_segments().map(|each| (each.p_vaddr + each.p_memsz) as usize).max().unwrap_or(first);
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
    let statics = match each_object() {
        Some(each_object) => of_objects(each_object, own),
        None => of_map(own),
    };
    let bytes = statics.bytes;
    *MEMORY.lock() = statics;
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
        let (about, (search, own)) =
            unsafe { (&*about, &mut *found.cast::<(StaticMemory, Range<usize>)>()) };
        // SAFETY: `dlpi_phdr` points to `dlpi_phnum` program headers of a loaded object, which
        // stays loaded during the call.
        let headers =
            unsafe { core::slice::from_raw_parts(about.dlpi_phdr, about.dlpi_phnum.into()) };
        headers.iter().for_each(|each| search.add_segment(about.dlpi_addr as usize, each, own));
        0
    }
    let mut search = (StaticMemory::new(), own);
    // SAFETY: the function has the type that libc expects, and keeps none of its arguments. `search`
    // lives until the call returns.
    unsafe { each_object(Some(add), (&raw mut search).cast()) };
    search.0
}

/// Returns the static memory of a program that the library has loaded, by the kernel's map. Only
/// the program is there yet.
fn of_map(own: Range<usize>) -> StaticMemory {
    let (mut statics, mut end) = (StaticMemory::new(), 0);
    // Without a map nothing is known of them. Then an engine can't be made later either.
    let _ = each_area(|area| {
        // Behind a file's data lies memory that is zeros in the beginning.
        let is_zeros = area.inode == 0 && area.start == end && area.name().is_empty();
        if area.writable && area.private && (area.inode != 0 || is_zeros) {
            statics.bytes += area.len();
            end = area.end;
            if is_zeros {
                statics.add_zeros(area.start..area.end, &own);
            }
        }
        Continue(())
    });
    statics
}

/// Records memory of a process without an engine that the kernel may write to at any time.
pub fn keep(range: Range<usize>) {
    MEMORY.lock().kept.add(range);
}

/// Records the argument of a call that is in progress while the engine is made.
pub fn keep_named(at: usize) {
    let start = at & !(PAGE_SIZE - 1);
    keep(start..start.saturating_add(2 * PAGE_SIZE));
}

/// Begins to note what the program maps. Its heap ends at `heap`.
pub fn begin(heap: usize) {
    MEMORY.lock().heap = heap.next_multiple_of(PAGE_SIZE);
}

/// Notes a call of a process without an engine that has changed mappings, and returned `made`. A
/// child of vfork doesn't call this. What it maps is not folded.
pub fn note_call(nr: usize, args: &[usize; 6], made: isize) {
    if (-4095..0).contains(&made) {
        return;
    }
    let pages =
        |start: usize, len: usize| start..start.saturating_add(len).next_multiple_of(PAGE_SIZE);
    MEMORY.lock().note_call(nr as i64, args, &pages, made as usize);
}

/// Returns the parts of `present`, which is there before the engine, that can't be folded.
pub fn never_folded(present: Range<usize>) -> RangeSet {
    let memory = MEMORY.lock();
    let mut never = RangeSet::new();
    let others = memory.mapped.cut_out_of(memory.zeros.cut_out_of([present.clone()].into()));
    others.into_iter().for_each(|part| never.add(part));
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
        let mut statics = StaticMemory::new();
        segments.iter().for_each(|each| statics.add_segment(base, each, &OWN));
        statics.zeros.take()
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

    fn mapped_after(calls: &[(i64, [usize; 6], isize)]) -> Vec<Range<usize>> {
        const START: usize = 0x10_0000;
        let mut memory = StaticMemory { heap: 0x5_0000, ..StaticMemory::new() };
        let pages = |start: usize, len: usize| start..(start + len).next_multiple_of(PAGE_SIZE);
        let map = [0, 0x10_0000, 0, (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as usize, 0, 0];
        memory.note_call(libc::SYS_mmap, &map, &pages, START);
        for (nr, args, result) in calls {
            memory.note_call(*nr, args, &pages, *result as usize);
        }
        memory.mapped.take()
    }

    #[test]
    fn mappings_made_before_the_engine_are_known() {
        let unmap = (libc::SYS_munmap, [0x11_0000, 0xfff, 0, 0, 0, 0], 0);
        assert_eq!(mapped_after(&[unmap]), [0x10_0000..0x11_0000, 0x11_1000..0x20_0000]);
        let file = [0, 0x1000, 0, (libc::MAP_PRIVATE | libc::MAP_FIXED) as usize, 3, 0];
        let fixed_call = (libc::SYS_mmap, file, 0x10_0000);
        assert_eq!(mapped_after(&[fixed_call]), [0x10_1000..0x20_0000]);
        let shared_call =
            (libc::SYS_mmap, [0, 0x1000, 0, libc::MAP_SHARED_VALIDATE as usize, 3, 0], 0x10_0000);
        assert_eq!(mapped_after(&[shared_call]), [0x10_1000..0x20_0000]);
        let move_call = (libc::SYS_mremap, [0x10_0000, 0x8_0000, 0x9_0000, 1, 0, 0], 0x30_0000);
        assert_eq!(mapped_after(&[move_call]), [0x18_0000..0x20_0000, 0x30_0000..0x39_0000]);
        let unknown = (libc::SYS_mremap, [0x1f_0000, 0x2_0000, 0x2_0000, 1, 0, 0], 0x30_0000);
        assert_eq!(mapped_after(&[unknown]), [0x10_0000..0x1f_0000], "in part of another kind");
        let heap = |end| (libc::SYS_brk, [end, 0, 0, 0, 0, 0], end as isize);
        assert_eq!(mapped_after(&[heap(0x4_0000)]), [0x10_0000..0x20_0000]);
        assert_eq!(mapped_after(&[heap(0x6_0000)]), [0x5_0000..0x6_0000, 0x10_0000..0x20_0000]);
        let guards = (libc::SYS_madvise, [0x10_0000, 0x1000, 102, 0, 0, 0], 0);
        assert_eq!(mapped_after(&[guards]), [0x10_1000..0x20_0000]);
    }

    #[test]
    fn own_image_holds_own_code_and_data() {
        let own = own_image();
        assert!(own.contains(&(own_image as *const () as usize)), "{own:x?}");
        assert!(own.contains(&(&raw const MEMORY as usize)), "{own:x?}");
        assert!(own.end < usize::MAX);
    }
}
