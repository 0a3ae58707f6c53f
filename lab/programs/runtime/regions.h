/* Actions on memory. Each does nothing where the regions don't allow it, so an action can be
 * dropped from a program and the rest still means something. */
#include "model.h"
#include <setjmp.h>

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

enum { IN_ORDER, SCATTERED };

/* A private mapping of a file has pages of this kind. */
static struct content file_content(const struct region *r, size_t p) {
    struct content none = {0}, page = {.seed = r->file_seed + p, .kind = QUARTER};
    return r->file_seed ? page : none;
}

/* The pages are as they were mapped. */
static void forget(struct region *r, size_t first, size_t count) {
    for (size_t p = first; p < first + count; p++) {
        struct content c = file_content(r, p);
        r->page[p] = (struct page){.now = c, .next = c};
    }
}

static void begin_region(struct region *r) {
    r->is_changing = 1;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static void end_region(struct region *r) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    r->is_changing = 0;
}

static void unmap_region(unsigned slot) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 || !r->at) return;
    begin_region(r);
    NEED(munmap(r->at, r->pages * PAGE) == 0);
    r->at = NULL;
    r->pages = 0;
    end_region(r);
}

/* Makes an empty file without a name, in the working directory or in memory. */
static int open_file(int flags) {
    int file = open(".", O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
    if (file < 0) file = memfd_create("pages", MFD_CLOEXEC);
    NEED(file >= 0);
    return file;
}

static struct page *pages_of(unsigned slot) { return page_table[slot % SLOTS ? me : 0][slot % SLOTS]; }

static void put_region(unsigned slot, size_t pages, int file) {
    struct region *r = region_of(slot);
    begin_region(r);
    r->page = pages_of(slot);
    r->at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | (file < 0 ? MAP_ANONYMOUS : 0), file, 0);
    NEED(r->at != MAP_FAILED);
    r->pages = pages;
    r->is_cut = 0;
    forget(r, 0, pages);
    end_region(r);
}

static void map_region(unsigned slot, size_t pages) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 && r->at) return;
    unmap_region(slot);
    r->file_seed = 0;
    put_region(slot, pages < MOST ? pages : MOST, -1);
}

/* The file has MOST / 4 pages, so the region may grow. */
static void map_file(unsigned slot, size_t pages) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0) return;
    unmap_region(slot);
    r->file_seed = new_seed();
    int file = open_file(0);
    uint64_t bytes[PAGE / 8];
    for (size_t p = 0; p < MOST / 4; p++) {
        struct content c = file_content(r, p);
        for (unsigned w = 0; w < PAGE / 8; w++) bytes[w] = filled_word(c.kind, key_of(c), w);
        NEED(pwrite(file, bytes, PAGE, p * PAGE) == (ssize_t)PAGE);
    }
    put_region(slot, pages < MOST / 4 ? pages : MOST / 4, file);
    close(file);
}

static void write_pages(unsigned slot, size_t first, size_t count, int order, enum kind kind) {
    struct range it = range(slot, first, count, order);
    for (size_t i = 0; i < it.count; i++) fill_page(it.region, page_of(&it, i), kind);
}

static void poke_pages(unsigned slot, size_t first, size_t count, int order) {
    struct range it = range(slot, first, count, order);
    for (size_t i = 0; i < it.count; i++) poke_page(it.region, page_of(&it, i));
}

static void check_pages(unsigned slot, size_t first, size_t count, int order) {
    struct range it = range(slot, first, count, order);
    for (size_t i = 0; i < it.count; i++) check_page(it.region, page_of(&it, i));
}

/* A child of fork may get ENOMEM from mremap where memory is hidden by its rights (docs/limits.md). Then its memory stays where
 * it is. */
static int is_refused(const char *at) {
    NEED(at != MAP_FAILED || (depth && errno == ENOMEM));
    return at == MAP_FAILED;
}

/* Changes a region's size, where it is if it may not move and there is room. */
static void resize_region(unsigned slot, size_t pages, int may_move) {
    struct region *r = region_of(slot);
    size_t before = r->pages, most = r->file_seed ? MOST / 4 : MOST;
    /* A call that grows takes one mapping only. */
    if (slot % SLOTS == 0 || !r->at || r->is_cut || !pages || pages > most) return;
    begin_region(r);
    char *at = mremap(r->at, before * PAGE, pages * PAGE, may_move ? MREMAP_MAYMOVE : 0);
    if (at == MAP_FAILED && !may_move && errno == ENOMEM) at = mremap(r->at, before * PAGE, pages * PAGE, MREMAP_MAYMOVE);
    if (!is_refused(at)) {
        r->at = at;
        r->pages = pages;
        if (pages > before) forget(r, before, pages - before);
    }
    end_region(r);
}

/* Moves a region to new addresses. */
static void move_region(unsigned slot) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 || !r->at || r->is_cut) return;
    begin_region(r);
    char *to = mmap(NULL, r->pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(to != MAP_FAILED);
    char *at = mremap(r->at, r->pages * PAGE, r->pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
    if (is_refused(at)) munmap(to, r->pages * PAGE);
    else NEED(at == to);
    if (at == to) r->at = to;
    end_region(r);
}

/* Moves the pages of a region to another slot. They leave zeros behind. */
static void leave_behind(unsigned slot, unsigned to_slot) {
    struct region *r = region_of(slot), *to = region_of(to_slot);
    if (slot % SLOTS == 0 || to_slot % SLOTS == 0 || r == to || !r->at || r->is_cut || r->file_seed) return;
    unmap_region(to_slot);
    begin_region(r);
    begin_region(to);
    char *at = mremap(r->at, r->pages * PAGE, r->pages * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    if (!is_refused(at)) {
        to->page = pages_of(to_slot);
        memcpy(to->page, r->page, r->pages * sizeof *r->page);
        to->at = at;
        to->pages = r->pages;
        to->file_seed = 0;
        to->is_cut = 0;
        forget(r, 0, r->pages);
    }
    end_region(to);
    end_region(r);
}

/* Cuts a region in two. The pages from `first` on go to another slot, but for `gap` unmapped ones. */
static void cut_region(unsigned slot, unsigned to_slot, size_t first, size_t gap) {
    struct region *r = region_of(slot), *to = region_of(to_slot);
    if (slot % SLOTS == 0 || to_slot % SLOTS == 0 || r == to || r->file_seed || !first || !gap || first + gap >= r->pages) return;
    unmap_region(to_slot);
    begin_region(r);
    begin_region(to);
    NEED(munmap(bytes_of(r, first), gap * PAGE) == 0);
    to->page = pages_of(to_slot);
    to->at = bytes_of(r, first + gap);
    to->pages = r->pages - first - gap;
    to->file_seed = 0;
    to->is_cut = r->is_cut;
    memcpy(to->page, r->page + first + gap, to->pages * sizeof *r->page);
    r->pages = first;
    end_region(to);
    end_region(r);
}

/* Moves the pages from `first` on to another slot. Of those, `count` are kept, and the others are unmapped by the same call. */
static void move_tail(unsigned slot, unsigned to_slot, size_t first, size_t count) {
    struct region *r = region_of(slot), *to = region_of(to_slot);
    if (slot % SLOTS == 0 || to_slot % SLOTS == 0 || r == to || r->is_cut || r->file_seed || !first || first >= r->pages || !count) return;
    size_t tail = r->pages - first, kept = count < tail ? count : tail;
    unmap_region(to_slot);
    begin_region(r);
    begin_region(to);
    char *place = mmap(NULL, kept * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(place != MAP_FAILED);
    char *at = mremap(bytes_of(r, first), tail * PAGE, kept * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, place);
    if (is_refused(at)) {
        munmap(bytes_of(r, first), tail * PAGE);
        munmap(place, kept * PAGE);
    } else {
        to->page = pages_of(to_slot);
        memcpy(to->page, r->page + first, kept * sizeof *r->page);
        to->at = at;
        to->pages = kept;
        to->file_seed = 0;
        to->is_cut = 0;
    }
    r->pages = first;
    end_region(to);
    end_region(r);
}

/* Bounds `count` to what the region has from `first` on. */
static size_t bounded(const struct region *r, size_t *first, size_t count) {
    if (!r->pages) return 0;
    *first %= r->pages;
    return count < r->pages - *first ? count : r->pages - *first;
}

/* Maps zeros over a part. */
static void replace_pages(unsigned slot, size_t first, size_t count) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 || r->file_seed || !(count = bounded(r, &first, count))) return;
    begin_region(r);
    r->is_cut = 1;
    NEED(mmap(bytes_of(r, first), count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
         bytes_of(r, first));
    forget(r, first, count);
    end_region(r);
}

/* Advice that changes no byte. It may fail, for example for guard pages. */
static void advise_pages(unsigned slot, size_t first, size_t count, int advice) {
    struct region *r = region_of(slot);
    if (!(count = bounded(r, &first, count))) return;
    /* Of a region of all, other threads write the pages meanwhile. */
    if (advice == MADV_HUGEPAGE || advice == MADV_NOHUGEPAGE) r->is_cut = 1;
    (void)madvise(bytes_of(r, first), count * PAGE, advice);
}

static void discard_page(struct region *r, size_t p, int advice) {
    struct page *page = &r->page[p];
    if (advice == MADV_FREE) {
        if (r->file_seed || !is_writable(page)) return;
        page->flags |= LAZY;
        NEED(madvise(bytes_of(r, p), PAGE, MADV_FREE) == 0);
        return;
    }
    if (page->flags & UNKNOWN) return;
    begin_change(page, file_content(r, p));
    NEED(madvise(bytes_of(r, p), PAGE, MADV_DONTNEED) == 0);
    end_change(page);
}

/* Discards page by page, as an owner may do in the region of all. */
static void discard_each(unsigned slot, size_t first, size_t count, int order, int advice) {
    struct range it = range(slot, first, count, order);
    for (size_t i = 0; i < it.count; i++) discard_page(it.region, page_of(&it, i), advice);
}

/* Discards pages by one call. */
static void discard_pages(unsigned slot, size_t first, size_t count, int advice) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 || !(count = bounded(r, &first, count))) return;
    for (size_t p = first; p < first + count; p++)
        if (advice == MADV_FREE && (r->file_seed || !is_writable(&r->page[p]))) return;
    begin_region(r);
    NEED(madvise(bytes_of(r, first), count * PAGE, advice) == 0);
    for (size_t p = first; p < first + count; p++) {
        struct content c = file_content(r, p);
        if (advice == MADV_FREE) r->page[p].flags |= LAZY;
        else r->page[p] = (struct page){.now = c, .next = c, .flags = r->page[p].flags & ~LAZY};
    }
    end_region(r);
}

/* Changes the rights of a part: PROT_NONE, PROT_READ or both. */
static void protect_pages(unsigned slot, size_t first, size_t count, int rights) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 || !(count = bounded(r, &first, count))) return;
    begin_region(r);
    r->is_cut = 1;
    NEED(mprotect(bytes_of(r, first), count * PAGE, rights) == 0);
    for (size_t p = first; p < first + count; p++) {
        r->page[p].flags &= ~(NO_ACCESS | READ_ONLY);
        r->page[p].flags |= rights == PROT_NONE ? NO_ACCESS : rights == PROT_READ ? READ_ONLY : 0;
    }
    end_region(r);
}

/* Installs or removes guard pages: both leave zeros. Before Linux 6.13 there are none. */
static void guard_pages(unsigned slot, size_t first, size_t count, int is_install) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 || r->file_seed || !(count = bounded(r, &first, count))) return;
    begin_region(r);
    int is_done = madvise(bytes_of(r, first), count * PAGE, is_install ? MADV_GUARD_INSTALL : MADV_GUARD_REMOVE) == 0;
    NEED(is_done || errno == EINVAL);
    for (size_t p = first; is_done && p < first + count; p++) {
        struct page *page = &r->page[p];
        if (is_install) *page = (struct page){.flags = (page->flags & ~LAZY) | GUARDED};
        else page->flags &= ~GUARDED;
    }
    end_region(r);
}

/* What a child of fork has of a part. */
static void inherit_pages(unsigned slot, size_t first, size_t count, int advice) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 || r->file_seed || !(count = bounded(r, &first, count))) return;
    begin_region(r);
    r->is_cut = 1;
    NEED(madvise(bytes_of(r, first), count * PAGE, advice) == 0);
    for (size_t p = first; p < first + count; p++) {
        uint32_t *flags = &r->page[p].flags;
        if (advice == MADV_DONTFORK) *flags |= NOT_IN_CHILD;
        if (advice == MADV_DOFORK) *flags &= ~NOT_IN_CHILD;
        if (advice == MADV_WIPEONFORK) *flags |= WIPED_IN_CHILD;
        if (advice == MADV_KEEPONFORK) *flags &= ~WIPED_IN_CHILD;
    }
    end_region(r);
}

static __thread sigjmp_buf after_fault;
static __thread volatile sig_atomic_t expects_fault;

static void on_segv(int signal) {
    if (expects_fault) siglongjmp(after_fault, 1);
    (void)!write(2, "WRONG: SIGSEGV\n", 15);
    (void)signal;
    _exit(97);
}

/* Returns whether a touch raises SIGSEGV. */
static int faults(volatile char *at, int is_write) {
    int is_fault = 1;
    if (sigsetjmp(after_fault, 1) == 0) {
        expects_fault = 1;
        char byte = *at;
        if (is_write) *at = byte;
        is_fault = 0;
    }
    expects_fault = 0;
    return is_fault;
}

/* Touches pages that may not be touched, and those beside. */
static void touch_pages(unsigned slot, size_t first, size_t count) {
    struct region *r = region_of(slot);
    if (slot % SLOTS == 0 || !(count = bounded(r, &first, count))) return;
    for (size_t p = first; p < first + count; p++) {
        struct page *page = &r->page[p];
        if (page->flags & UNKNOWN) continue;
        NEED(faults(bytes_of(r, p), 0) == !is_readable(page));
        if (!(page->flags & LAZY)) NEED(faults(bytes_of(r, p), 1) == !is_writable(page));
    }
}
