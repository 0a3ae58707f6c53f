//! Nothing allocates after set-up, because the pager saves and loads where the host's `malloc` must
//! not be called.
use memfold_os::units::{Order, PAGE_SIZE};
use memfold_store::{BlockSet, CodecSpec, Handle, Store, StoreConfig};
use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::SeqCst};

static CALLS: AtomicU64 = AtomicU64::new(0);
/// The thread whose calls count: the test harness has its own thread, which reports slow tests.
static COUNTED: AtomicI32 = AtomicI32::new(0);

fn note_call() {
    // SAFETY: takes nothing and returns a number.
    if unsafe { libc::gettid() } == COUNTED.load(SeqCst) {
        CALLS.fetch_add(1, SeqCst);
    }
}

// The names that both Rust's allocator and the codecs' C code call, in front of glibc's own.
unsafe extern "C" {
    fn __libc_malloc(size: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
    fn __libc_realloc(at: *mut c_void, size: usize) -> *mut c_void;
    fn __libc_free(at: *mut c_void);
}

#[unsafe(no_mangle)]
extern "C" fn malloc(size: usize) -> *mut c_void {
    note_call();
    // SAFETY: any size is allowed.
    unsafe { __libc_malloc(size) }
}

#[unsafe(no_mangle)]
extern "C" fn calloc(count: usize, size: usize) -> *mut c_void {
    note_call();
    // SAFETY: any numbers are allowed.
    unsafe { __libc_calloc(count, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(at: *mut c_void, size: usize) -> *mut c_void {
    note_call();
    // SAFETY: as the caller says.
    unsafe { __libc_realloc(at, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn free(at: *mut c_void) {
    note_call();
    // SAFETY: as the caller says.
    unsafe { __libc_free(at) }
}

#[repr(C, align(4096))]
#[derive(Copy, Clone)]
struct Page([u8; PAGE_SIZE]);

/// Returns text-like, random, patterned and empty pages.
fn folio(pages: usize) -> Vec<Page> {
    let mut state = 1u32;
    let mut page = |i: usize| {
        let mut page = Page([0; PAGE_SIZE]);
        for (at, byte) in page.0.iter_mut().enumerate() {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            *byte = match i % 7 {
                0 => 0,
                1 => (state >> 24) as u8,
                2 => 0x5a,
                _ => b"the quick brown fox "[(at + (state >> 31) as usize) % 20],
            };
        }
        page
    };
    (0..pages).map(&mut page).collect()
}

#[test]
fn saves_loads_frees_and_compaction_allocate_nothing() {
    // SAFETY: takes nothing and returns a number.
    COUNTED.store(unsafe { libc::gettid() }, SeqCst);
    let order = Order::new(6).unwrap();
    let source = folio(order.pages());
    let mut target = source.clone();
    for spec in [
        "none",
        "lz4",
        "zstd:-5",
        "zstd",
        "zstd:7",
        "zstd:19",
        "lz4hc",
        "lz4hc:2",
        "deflate",
        "deflate:6",
        "deflate:12",
    ] {
        let config = StoreConfig {
            codec: CodecSpec::parse(spec).unwrap(),
            block_order: Order::new(3).unwrap(),
            verify: true,
            ..StoreConfig::default()
        };
        let store = Store::new(&config).unwrap();
        let mut worker = store.worker();
        let mut out = [Handle::NONE; 8];
        let before = CALLS.load(SeqCst);
        for round in 0..48u64 {
            let which = BlockSet::first(1 + round as usize % 8);
            // SAFETY: both folios have `order` pages and are not shared; the handles are freed
            // after their loads.
            unsafe {
                let from = source.as_ptr().cast();
                store.save(&mut worker, from, order, round, &which, || false, &mut out).unwrap();
                let block = store.block_order(order);
                store.load(&mut worker, out[0], block, target.as_mut_ptr().cast()).unwrap();
                store
                    .load_pages(&mut worker, out[0], block, 1, 3, target.as_mut_ptr().cast())
                    .unwrap();
            }
            if round % 3 != 0 {
                store.free_many(&out);
            }
            out = [Handle::NONE; 8];
            if round % 12 == 0 {
                store.compact(u64::MAX);
                store.stats();
            }
        }
        assert_eq!(CALLS.load(SeqCst), before, "{spec} allocated");
        drop((worker, store));
        assert!(CALLS.load(SeqCst) > before, "the test counts");
    }
}
