/* Changes of the address space under folded memory. */
#include "bare.h"
#include <setjmp.h>

static const size_t LEN = 48 * UNIT;

static void munmap_middle(void) {
    char *p = map_folded(LEN, 1);
    size_t cut = 11 * PAGE + 16 * UNIT, end = 29 * UNIT + 3 * PAGE;
    NEED(munmap(p + cut, end - cut) == 0);
    check_from(p, cut, 1, 0);
    check_from(p + end, LEN - end, 1, end / PAGE);
    char *q = map_at(p + cut, end - cut, MAP_FIXED_NOREPLACE);
    check_zero(q, end - cut);
    fill(q, end - cut, 2);
    push_out(p, LEN);
    check_from(p, cut, 1, 0);
    check(q, end - cut, 2);
    check_from(p + end, LEN - end, 1, end / PAGE);
    NEED(munmap(p, LEN) == 0);
}

static void map_fixed_over(void) {
    char *p = map_folded(LEN, 3);
    size_t cut = 5 * PAGE + 8 * UNIT, end = 33 * UNIT + PAGE;
    char *q = map_at(p + cut, end - cut, MAP_FIXED);
    check_zero(q, UNIT);
    fill(q, end - cut, 4);
    check_from(p, cut, 3, 0);
    check_from(p + end, LEN - end, 3, end / PAGE);
    push_out(p, LEN);
    check(q, end - cut, 4);
    check_from(p, cut, 3, 0);
    check_from(p + end, LEN - end, 3, end / PAGE);
}

static void mremap_move(void) {
    char *p = map_folded(LEN, 5);
    char *hole = map(2 * LEN + 4 * UNIT);
    NEED(munmap(hole, 2 * LEN + 4 * UNIT) == 0);
    char *to = hole + 7 * PAGE;
    NEED(mremap(p, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
    check(to, LEN, 5);
    char *back = mremap(to + 3 * UNIT, 9 * UNIT + PAGE, 9 * UNIT + PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, p);
    NEED(back == p);
    check_from(p, 9 * UNIT + PAGE, 5, 3 * UNIT / PAGE);
    check(to, 3 * UNIT, 5);
    check_from(to + 12 * UNIT + PAGE, LEN - 12 * UNIT - PAGE, 5, 12 * UNIT / PAGE + 1);
    /* New memory at the old address. The keys of the old memory are still in use. */
    char *fresh = map_at(p + 9 * UNIT + PAGE, LEN - 9 * UNIT - PAGE, MAP_FIXED_NOREPLACE);
    fill(fresh, LEN - 9 * UNIT - PAGE, 6);
    push_out(p, LEN);
    check(fresh, LEN - 9 * UNIT - PAGE, 6);
    check_from(p, 9 * UNIT + PAGE, 5, 3 * UNIT / PAGE);
    check(to, 3 * UNIT, 5);
    /* Over folded memory. */
    NEED(mremap(to, 3 * UNIT, 3 * UNIT, MREMAP_MAYMOVE | MREMAP_FIXED, fresh + 5 * PAGE) == fresh + 5 * PAGE);
    check(fresh, 5 * PAGE, 6);
    check(fresh + 5 * PAGE, 3 * UNIT, 5);
    check_from(fresh + 5 * PAGE + 3 * UNIT, UNIT, 6, 5 + 3 * UNIT / PAGE);
}

/* MREMAP_DONTUNMAP leaves an empty mapping behind. The pages are right at their new place. */
static void mremap_leaves(void) {
    char *p = map_folded(LEN, 4);
    for (int round = 0; round < 3; round++) {
        char *q = mremap(p, LEN, LEN, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
        NEED(q != MAP_FAILED && q != p);
        check_zero(p, LEN);
        check(q, LEN, 4);
        fill(p, LEN, 5 + round);
        push_out(q, LEN);
        check(p, LEN, 5 + round);
        check(q, LEN, 4);
        NEED(munmap(p, LEN) == 0);
        p = q;
    }
}

static void mremap_reread(void) {
    char *p = map_folded(LEN, 5), *to = map(LEN);
    read_apart(p, LEN, 5);
    NEED(mremap(p, LEN, LEN, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
    fill_apart(to, LEN, 6);
    push_out(to, LEN);
    check_apart(to, LEN, 5, 6);
}

static void mremap_grow(void) {
    char *hole = map(3 * LEN);
    NEED(munmap(hole, 3 * LEN) == 0);
    char *p = map_at(hole, LEN, MAP_FIXED_NOREPLACE);
    fill(p, LEN, 7);
    push_out(p, LEN);
    NEED(mremap(p, LEN, 2 * LEN, 0) == p);
    check_zero(p + LEN, 3 * UNIT);
    fill_from(p + LEN, LEN, 7, LEN / PAGE);
    check(p, 2 * LEN, 7);
    push_out(p, 2 * LEN);
    check(p, 2 * LEN, 7);
    char *q = mremap(p, 2 * LEN, 3 * LEN + PAGE, MREMAP_MAYMOVE);
    NEED(q != MAP_FAILED);
    check_zero(q + 2 * LEN, UNIT);
    check(q, 2 * LEN, 7);
    fill_from(q + 2 * LEN, LEN + PAGE, 7, 2 * LEN / PAGE);
    check(q, 3 * LEN + PAGE, 7);
}

static void mremap_shrink(void) {
    char *p = map_folded(LEN, 8);
    size_t less = 20 * UNIT + 3 * PAGE;
    NEED(mremap(p, LEN, less, 0) == p);
    check(p, less, 8);
    NEED(mremap(p, less, LEN, 0) == p);
    check_zero(p + less, LEN - less);
    check(p, less, 8);
}

static void dontneed(void) {
    char *p = map_folded(LEN, 9);
    size_t cut = 9 * UNIT + 7 * PAGE, end = 30 * UNIT + 9 * PAGE;
    NEED(madvise(p + cut, end - cut, MADV_DONTNEED) == 0);
    check_zero(p + cut, end - cut);
    check_from(p, cut, 9, 0);
    check_from(p + end, LEN - end, 9, end / PAGE);
    fill_from(p + cut, end - cut, 10, cut / PAGE);
    push_out(p, LEN);
    for (size_t at = cut; at < end; at += 64 * PAGE) NEED(madvise(p + at, PAGE, MADV_DONTNEED) == 0);
    for (size_t at = cut; at < end; at += PAGE)
        (at - cut) % (64 * PAGE) == 0 ? check_zero(p + at, PAGE) : check_from(p + at, PAGE, 10, at / PAGE);
    check_from(p, cut, 9, 0);
    check_from(p + end, LEN - end, 9, end / PAGE);
}

/* After MADV_FREE a page has its old bytes or zeros, until it is written to. */
static void madv_free(void) {
    char *p = map_folded(LEN, 11);
    NEED(madvise(p + 8 * UNIT, 24 * UNIT, MADV_FREE) == 0);
    push_out(p, LEN);
    for (size_t at = 8 * UNIT; at < 32 * UNIT; at += PAGE)
        *(volatile uint64_t *)(p + at) == 0 ? check_zero(p + at, PAGE) : check_from(p + at, PAGE, 11, at / PAGE);
    fill_from(p + 8 * UNIT, 24 * UNIT, 12, 0);
    check(p, 8 * UNIT, 11);
    check(p + 8 * UNIT, 24 * UNIT, 12);
    check_from(p + 32 * UNIT, LEN - 32 * UNIT, 11, 32 * UNIT / PAGE);
}

/* Linux 6.13. */
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

/* Guard pages discard the old contents. These don't return when the guards are removed. */
static void guards(void) {
    char *p = map_folded(LEN, 15);
    size_t cut = 9 * UNIT + 7 * PAGE, end = 30 * UNIT + 9 * PAGE;
    for (int round = 0; round < 2; round++) {
        if (madvise(p + cut, end - cut, MADV_GUARD_INSTALL) && errno == EINVAL) return;
        check_from(p, cut, 15, 0);
        check_from(p + end, LEN - end, 15, end / PAGE);
        push_out(p, cut);
        NEED(!madvise(p + cut, end - cut, MADV_GUARD_REMOVE));
        check_zero(p + cut, end - cut);
        fill_from(p + cut, end - cut, 16, 0);
        check(p + cut, end - cut, 16);
    }
    check_from(p, cut, 15, 0);
    check_from(p + end, LEN - end, 15, end / PAGE);
}

static sigjmp_buf at_guard;
static void meet(int signal) {
    (void)signal;
    siglongjmp(at_guard, 1);
}

/* Guard pages stay in place during all other changes around them. */
static void guards_stay(void) {
    char *p = map_folded(LEN, 17);
    size_t cut = 9 * UNIT, end = 9 * UNIT + 32 * PAGE;
    if (madvise(p + cut, end - cut, MADV_GUARD_INSTALL) && errno == EINVAL) return;
    struct sigaction action = {.sa_handler = meet};
    NEED(sigaction(SIGSEGV, &action, NULL) == 0);
    NEED(mprotect(p, LEN, PROT_READ | PROT_WRITE) == 0);
    for (volatile int round = 0; round < 3; round++) {
        NEED(madvise(p + cut - 4 * UNIT, 8 * UNIT, MADV_DONTNEED) == 0);
        push_out(p + 24 * UNIT, LEN - 24 * UNIT);
        for (volatile size_t n = 0; n < 32; n++)
            if (!sigsetjmp(at_guard, 1)) {
                p[cut + n * PAGE]++;
                fail("a guard lets pass", __FILE__, __LINE__);
            }
        NEED(mprotect(p + UNIT, LEN - UNIT, PROT_READ | PROT_WRITE) == 0);
    }
    NEED(!madvise(p + cut, end - cut, MADV_GUARD_REMOVE));
    check_zero(p + cut, end - cut);
    check_from(p, cut - 4 * UNIT, 17, 0);
    check_from(p + 24 * UNIT, LEN - 24 * UNIT, 17, 24 * UNIT / PAGE);
}

static void other_advice(void) {
    char *p = map_folded(LEN, 13);
    NEED(madvise(p, LEN, MADV_WILLNEED) == 0);
    check(p, LEN, 13);
    NEED(madvise(p, LEN, MADV_SEQUENTIAL) == 0 && madvise(p, LEN / 2, MADV_HUGEPAGE) == 0);
    check(p, LEN, 13);
    (void)madvise(p, LEN, MADV_COLD);
    NEED(madvise(p, LEN, MADV_PAGEOUT) == 0);
    check(p, LEN, 13);
    for (int round = 0; round < 3; round++) check(p, 4 * UNIT, 13);
    NEED(present(p, 4 * UNIT) > 0);
    page_out(p + PAGE, 4 * UNIT - 3 * PAGE, 0);
    /* The kernel refuses most of this, and says so at once. */
    NEED(madvise(NULL, 1ul << 46, MADV_PAGEOUT) == -1 && errno == ENOMEM);
    NEED(madvise(p, 1ul << 62, MADV_COLD) == -1);
    check(p, 4 * UNIT, 13);
    NEED(madvise(p, 4 * UNIT, MADV_POPULATE_WRITE) == 0);
    check(p, LEN, 13);
    NEED(mlock(p, 2 * UNIT) == 0);
    push_out(p + 2 * UNIT, LEN - 2 * UNIT);
    check(p, LEN, 13);
    NEED(munlock(p, 2 * UNIT) == 0);
    check(p, LEN, 13);
}

static void read_only(void) {
    char *p = map_folded(LEN, 14);
    NEED(mprotect(p, LEN / 2, PROT_READ) == 0);
    check(p, LEN, 14);
    push_out(p + LEN / 2, LEN / 2);
    check(p, LEN, 14);
    for (int round = 0; round < 2; round++) {
        push_out(p + LEN / 2, LEN / 2);
        for (size_t at = 0; at < LEN; at += 33 * PAGE) check_from(p + at, PAGE, 14, at / PAGE);
    }
    NEED(mprotect(p, LEN, PROT_READ | PROT_WRITE) == 0);
    fill_from(p + UNIT, 8 * UNIT, 14, UNIT / PAGE);
    check(p, LEN, 14);
    push_out(p, LEN);
    check(p, LEN, 14);
    push_out(p, LEN); /* The pages that are resident from now on can't be folded. */
    NEED(mprotect(p + 5 * PAGE, LEN - 16 * PAGE, PROT_NONE) == 0);
    push_out(p, LEN);
    NEED(mprotect(p + 5 * PAGE, LEN - 16 * PAGE, PROT_READ) == 0);
    check(p, LEN, 14);
    /* Many small areas of both kinds. */
    NEED(mprotect(p, LEN, PROT_READ | PROT_WRITE) == 0);
    for (size_t at = 0; at < LEN; at += 40 * PAGE) NEED(mprotect(p + at, 7 * PAGE, PROT_READ) == 0);
    push_out(filler, 48 * UNIT);
    check(p, LEN, 14);
    for (size_t at = 7 * PAGE; at < LEN; at += 40 * PAGE) fill_from(p + at, PAGE, 14, at / PAGE);
    check(p, LEN, 14);
}

static void sparse(void) {
    size_t all = 64ul << 30, step = 7 * UNIT + 3 * PAGE;
    char *p = map_at(NULL, all, MAP_NORESERVE);
    for (int round = 0; round < 3; round++) {
        for (size_t at = 0; at + 2 * PAGE < all; at += step)
            if (round == 0) fill_from(p + at, 2 * PAGE, 15, at / PAGE);
            else check_from(p + at, 2 * PAGE, 15, at / PAGE);
        fill(p + PAGE * 4, 40 * PAGE, 16);
        check(p + PAGE * 4, 40 * PAGE, 16);
    }
    /* Reading untouched memory maps only zeros. */
    check_zero(p + all - 32 * UNIT, 16 * PAGE);
    NEED(munmap(p, all) == 0);
}

/* mseal (Linux 6.10): the mapping can't be changed any more, but its bytes can. */
static void sealed(void) {
    char *p = map_folded(LEN, 15);
    if (syscall(462, p, LEN / 2, 0)) {
        NEED(errno == ENOSYS);
        return;
    }
    NEED(mprotect(p, PAGE, PROT_READ) && errno == EPERM);
    check(p, LEN, 15);
    fill(p, LEN, 16);
    push_out(p + LEN / 2, LEN / 2);
    check(p, LEN, 16);
}

#ifndef SYS_mseal
#define SYS_mseal 462
#endif

/* Moves of several mappings, which Linux 6.17 supports: a gap leaves the old memory at the new
 * place. */
static void mremap_several(void) {
    const size_t part = LEN / 4;
    for (int keeps = 0; keeps < 2; keeps++)
        for (int gap = 1; gap <= 3; gap++) {
            int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (keeps ? MREMAP_DONTUNMAP : 0);
            char *from = map_folded(LEN, 31), *to = map_folded(LEN, 32);
            NEED(munmap(from + gap * part, part) == 0);
            NEED(mprotect(from, PAGE * 5, PROT_READ) == 0);
            push_out(to, LEN);
            if (mremap(from, LEN, LEN, flags, to) != to) {
                NEED(errno == EFAULT);
                check(from, part, 31), check(to, LEN, 32);
                return;
            }
            for (int n = 0; n < 4; n++) check_from(to + n * part, part, n == gap ? 32 : 31, n * part / PAGE);
            if (keeps) check_zero(from, part);
            push_out(to, LEN);
            for (int n = 0; n < 4; n++) check_from(to + n * part, part, n == gap ? 32 : 31, n * part / PAGE);
            NEED(munmap(to, LEN) == 0 && munmap(from, LEN) == 0);
        }
}

/* One mapping can't be moved. Those before it have moved. */
static void mremap_fails_half_way(void) {
    const size_t part = LEN / 4;
    for (int keeps = 0; keeps < 2; keeps++) {
        int flags = MREMAP_MAYMOVE | MREMAP_FIXED | (keeps ? MREMAP_DONTUNMAP : 0);
        char *from = map_folded(LEN, 33), *to = map_folded(LEN, 34);
        NEED(mprotect(from, part, PROT_READ) == 0);
        NEED(mprotect(from + 2 * part, part, PROT_READ) == 0);
        if (syscall(SYS_mseal, from + 2 * part, part, 0)) return;
        push_out(to, LEN);
        NEED(mremap(from, LEN, LEN, flags, to) == MAP_FAILED && (errno == EPERM || errno == EFAULT));
        /* Before Linux 6.17, a plain mremap moves nothing. The gate moves one mapping after the
         * other. */
        check_from(to, 2 * part, 33, 0);
        check_from(to + 2 * part, 2 * part, 34, 2 * part / PAGE);
        check_from(from + 2 * part, 2 * part, 33, 2 * part / PAGE);
        if (keeps) check_zero(from, 2 * part);
        push_out(to, LEN);
        check_from(to, 2 * part, 33, 0);
        check_from(to + 2 * part, 2 * part, 34, 2 * part / PAGE);
    }
}

/* The kernel follows the advice up to the first mapping that refuses it. */
static void advised_in_part(void) {
    const size_t part = LEN / 4;
    for (int way = 0; way < 3; way++) {
        char *p = map_folded(LEN, 35);
        if (way == 0) NEED(mlock(p + 2 * part, 4 * PAGE) == 0);
        if (way > 0) {
            NEED(mprotect(p + 2 * part, part, PROT_READ) == 0);
            if (syscall(SYS_mseal, p + 2 * part, part, 0)) return;
        }
        if (way == 2) {
            struct iovec all = {p, LEN};
            int self = syscall(SYS_pidfd_open, getpid(), 0);
            ssize_t done = syscall(SYS_process_madvise, self, &all, 1, MADV_DONTNEED, 0);
            NEED(done == -1);
            close(self);
            if (errno == EINVAL) return;
        } else {
            NEED(madvise(p, LEN, MADV_DONTNEED) == -1 && (errno == EINVAL || errno == EPERM));
        }
        check_zero(p, 2 * part);
        check_from(p + 2 * part, 2 * part, 35, 2 * part / PAGE);
        fill(p, 2 * part, 36);
        push_out(p, LEN);
        check(p, 2 * part, 36);
        check_from(p + 2 * part, 2 * part, 35, 2 * part / PAGE);
    }
}

/* A lock that ends at a gap: the memory before the gap is locked. */
static void locked_in_part(void) {
    const size_t part = UNIT;
    char *p = map_folded(LEN, 37);
    NEED(munmap(p + part, PAGE) == 0);
    NEED(mlock(p, 2 * part) == -1 && errno == ENOMEM);
    push_out(p + 2 * part, LEN - 2 * part);
    unsigned char is_there[1];
    NEED(mincore(p, PAGE, is_there) == 0 && is_there[0] & 1);
    check(p, part, 37);
    check_from(p + part + PAGE, LEN - part - PAGE, 37, part / PAGE + 1);
    NEED(munlock(p, part) == 0);
    push_out(p, part);
    check(p, part, 37);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"munmap_middle", munmap_middle}, {"map_fixed_over", map_fixed_over}, {"mremap_move", mremap_move},
        {"mremap_reread", mremap_reread}, {"mremap_leaves", mremap_leaves},
        {"mremap_grow", mremap_grow},     {"mremap_shrink", mremap_shrink},   {"dontneed", dontneed},
        {"free", madv_free},              {"advice", other_advice},           {"read_only", read_only},
        {"guards", guards},
        {"guards_stay", guards_stay},
        {"mremap_several", mremap_several},
        {"mremap_half", mremap_fails_half_way},
        {"advised", advised_in_part},
        {"locked", locked_in_part},
        {"sparse", sparse},               {"sealed", sealed},
    };
    return RUN_NAMED(argc, argv, all);
}
