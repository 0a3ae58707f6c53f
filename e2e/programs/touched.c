/* Memory that other threads use while a call moves, resizes, replaces or discards it. */
#include "common.h"
#include <sys/resource.h>

static const size_t LEN = 48 * UNIT, KEPT = 24 * UNIT;
static volatile int stops;

/* A thread that writes a number to `spot` as soon as it reads 0 there. */
static volatile uint64_t *volatile spot, wrote;

static void *write_to_zeros(void *unused) {
    (void)unused;
    for (uint64_t n = 1; !stops; n++) {
        while (*spot != 0 && !stops) {}
        *spot = n;
        __sync_synchronize();
        wrote = n;
        while (*spot == n && !stops) {}
    }
    return NULL;
}

/* Makes a call again and again that leaves zeros at `spot`. No write that follows may be lost. */
static void leave_zeros(char *p, void (*change)(char *at, size_t len)) {
    char *at = p + 20 * UNIT;
    spot = (uint64_t *)at;
    *spot = ~0ul;
    pthread_t writer;
    NEED(pthread_create(&writer, NULL, write_to_zeros, NULL) == 0);
    for (int round = 0; round < 150; round++) {
        uint64_t before = wrote;
        if (round % 4 == 0) page_out(at, 2 * UNIT, UNIT / PAGE);
        *spot = ~1ul;
        change(at, 2 * UNIT);
        while (wrote == before) {}
        NEED(*spot == wrote);
        fill_from(at + PAGE, 2 * UNIT - PAGE, 5, 1);
    }
    stops = 1;
    NEED(pthread_join(writer, NULL) == 0);
    check_from(p, 20 * UNIT, 1, 0);
    check_from(at + 2 * UNIT, LEN - 22 * UNIT, 1, 22 * UNIT / PAGE);
}

static void replace(char *at, size_t len) { map_at(at, len, MAP_FIXED); }
static void discard(char *at, size_t len) { NEED(madvise(at, len, MADV_DONTNEED) == 0); }
static char *elsewhere;
static void move_out(char *at, size_t len) {
    NEED(mremap(at, len, len, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, elsewhere) == elsewhere);
}

static void replaced(void) { leave_zeros(map_folded(LEN, 1), replace); }
static void discarded(void) { leave_zeros(map_folded(LEN, 1), discard); }
static void moved_out(void) {
    elsewhere = map(2 * UNIT);
    leave_zeros(map_folded(LEN, 1), move_out);
}

/* Threads that read memory, and write to words of their own in it, which no call changes. */
static char *kept;
static uint64_t own[2][24 * UNIT / PAGE];
static volatile long visits[2];

static void *visit(void *arg) {
    size_t me = (size_t)arg, r = me * 99991 + 7;
    for (; !stops; visits[me]++) {
        size_t page = mix(r++) % (KEPT / PAGE);
        volatile uint64_t *at = (uint64_t *)(kept + page * PAGE);
        NEED(at[0] == page + 1);
        NEED(at[1 + me] == own[me][page]);
        if (r % 4 == 0) at[1 + me] = ++own[me][page];
    }
    return NULL;
}

static void shrink(void) {
    NEED(mremap(kept, 2 * KEPT, KEPT, MREMAP_MAYMOVE) == kept);
    map_at(kept + KEPT, KEPT, MAP_FIXED);
}
static void grow(void) {
    NEED(munmap(kept + 2 * KEPT, KEPT) == 0);
    NEED(mremap(kept, 2 * KEPT, 3 * KEPT, MREMAP_MAYMOVE) == kept);
    NEED(mmap(kept + 2 * KEPT, KEPT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED);
}
static void refuse(void) { NEED(mremap(kept, 2 * KEPT, 1ul << 46, MREMAP_MAYMOVE) == MAP_FAILED); }
static void protect(void) {
    NEED(mprotect(kept + KEPT, KEPT, PROT_READ) == 0);
    NEED(mprotect(kept + KEPT, KEPT, PROT_READ | PROT_WRITE) == 0);
}
static void advise(void) {
    NEED(madvise(kept + KEPT, KEPT, MADV_DONTDUMP) == 0);
    NEED(madvise(kept + KEPT, KEPT, MADV_DODUMP) == 0);
    NEED(madvise(kept, KEPT, MADV_COLD) == 0);
}

/* Makes a call again and again that leaves the first KEPT bytes as they are. */
static void keep(void (*change)(void)) {
    kept = mmap(NULL, 3 * KEPT, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(kept != MAP_FAILED);
    map_at(kept, 2 * KEPT, MAP_FIXED);
    for (size_t page = 0; page < KEPT / PAGE; page++) {
        fill_from(kept + page * PAGE, PAGE, 2, page);
        uint64_t *at = (uint64_t *)(kept + page * PAGE);
        at[0] = page + 1, at[1] = at[2] = 0;
    }
    push_out(kept, KEPT);
    pthread_t threads[2];
    for (size_t n = 0; n < 2; n++) NEED(pthread_create(&threads[n], NULL, visit, (void *)n) == 0);
    for (int round = 0; round < 200; round++) {
        long before = visits[0];
        change();
        while (visits[0] < before + 20) {}
    }
    stops = 1;
    for (size_t n = 0; n < 2; n++) NEED(pthread_join(threads[n], NULL) == 0);
    for (size_t page = 0; page < KEPT / PAGE; page++) {
        uint64_t *at = (uint64_t *)(kept + page * PAGE), key = page_key(2, page);
        NEED(at[0] == page + 1 && at[1] == own[0][page] && at[2] == own[1][page]);
        for (unsigned w = 3; w < PAGE / 8; w++) NEED(at[w] == word(key, w));
    }
}

static void shrunk(void) { keep(shrink); }
static void grown(void) { keep(grow); }
static void refused(void) { keep(refuse); }
static void protected(void) { keep(protect); }
static void advised(void) { keep(advise); }

/* Threads that look at the target of a move, and write there as soon as it has changed. */
enum { PAGES = 64 };
static char *target;
static volatile uint64_t turn, seen[2];

static void *watch(void *arg) {
    size_t me = (size_t)arg;
    for (uint64_t last = 0; !stops;) {
        uint64_t now = turn;
        if (now == last) continue;
        last = now;
        size_t page = (me * 31 + now * 7) % PAGES;
        volatile uint64_t *at = (uint64_t *)(target + page * PAGE);
        uint64_t value;
        while ((value = *at) == ~now && !stops) {}
        if (stops) break;
        NEED(value == word(page_key(now, page), 0));
        at[9 + me] = now;
        __sync_synchronize();
        seen[me] = now;
    }
    return NULL;
}

static void moved_in(void) {
    char *all = map_folded(LEN, 3);
    target = map(PAGES * PAGE);
    pthread_t threads[2];
    for (size_t n = 0; n < 2; n++) NEED(pthread_create(&threads[n], NULL, watch, (void *)n) == 0);
    for (uint64_t now = 1; now <= 60; now++) {
        char *from = all + now * 5 * 16 * PAGE % (LEN - PAGES * PAGE);
        fill(from, PAGES * PAGE, now);
        page_out(from, PAGES * PAGE, PAGES / 2);
        for (int page = 0; page < PAGES; page++) *(uint64_t *)(target + page * PAGE) = ~now;
        turn = now;
        NEED(mremap(from, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target);
        for (size_t n = 0; n < 2; n++) while (seen[n] != now) {}
        for (size_t page = 0; page < PAGES; page++) {
            uint64_t *at = (uint64_t *)(target + page * PAGE), key = page_key(now, page);
            for (size_t w = 0; w < PAGE / 8; w++) {
                size_t n = w - 9;
                int is_own = n < 2 && (n * 31 + now * 7) % PAGES == page;
                NEED(at[w] == (is_own ? now : word(key, w)));
            }
        }
        map_at(from, PAGES * PAGE, MAP_FIXED);
    }
    stops = 1;
    for (size_t n = 0; n < 2; n++) NEED(pthread_join(threads[n], NULL) == 0);
}

/* At vm.max_map_count each call fails as it does plainly, or is done. The program goes on, and
 * what the call doesn't change stays. */
static void too_many_mappings(void) {
    char *p = map_folded(LEN, 7);
    size_t count = 70000;
    char *many = mmap(NULL, count * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(many != MAP_FAILED);
    size_t at = 1;
    while (at < count && mprotect(many + at * PAGE, PAGE, PROT_READ) == 0) at += 2;
    NEED(errno == ENOMEM);
    check(p, LEN, 7);
    page_out(p, LEN, LEN / PAGE);
    char *q = p + 10 * UNIT;
    (void)!mlock(q, PAGE);
    (void)!madvise(q + UNIT, PAGE, MADV_DONTDUMP);
    (void)!madvise(q + 2 * UNIT, PAGE, MADV_MERGEABLE);
    (void)!madvise(q + 3 * UNIT, PAGE, MADV_DONTFORK);
    (void)!mprotect(q + 4 * UNIT, PAGE, PROT_READ);
    int is_discarded = madvise(q + 5 * UNIT, 16 * PAGE, MADV_DONTNEED) == 0;
    int is_gone = munmap(q + 6 * UNIT, PAGE) == 0;
    int is_replaced = mmap(q + 7 * UNIT, PAGE, PROT_READ, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    for (size_t page = 0; page < LEN / PAGE; page++) {
        char *now = p + page * PAGE;
        if (is_gone && now == q + 6 * UNIT) continue;
        int is_zero = (is_replaced && now == q + 7 * UNIT) || (is_discarded && now >= q + 5 * UNIT && now < q + 5 * UNIT + 16 * PAGE);
        is_zero ? check_zero(now, PAGE) : check_from(now, PAGE, 7, page);
    }
}

static double kernel_seconds(void) {
    struct rusage used;
    NEED(getrusage(RUSAGE_SELF, &used) == 0);
    return used.ru_stime.tv_sec + used.ru_stime.tv_usec / 1e6;
}

/* A buffer that grows in many small steps costs what is added, not what is there. */
static void grows_by_steps(void) {
    const size_t step = 16 * PAGE, steps = 3000;
    double start = kernel_seconds();
    char *whole = map(steps * step);
    for (size_t n = 0; n < steps; n++) fill_from(whole + n * step, step, 8, n * 16);
    check(whole, steps * step, 8);
    double middle = kernel_seconds();
    NEED(munmap(whole, steps * step) == 0);
    char *p = map(step);
    fill(p, step, 9);
    for (size_t n = 1; n < steps; n++) {
        p = mremap(p, n * step, (n + 1) * step, MREMAP_MAYMOVE);
        NEED(p != MAP_FAILED);
        fill_from(p + n * step, step, 9, n * 16);
    }
    check(p, steps * step, 9);
    double at_once = middle - start, by_steps = kernel_seconds() - middle;
    fprintf(stderr, "in the kernel: %.2f s at once, %.2f s by steps\n", at_once, by_steps);
    NEED(by_steps < 4 * at_once + 0.2);
}

/* A guard stays while the pages around it are discarded, loaded and written to. */
static void guarded(void) {
    enum { INSTALL = 102, REMOVE = 103 };
    char *p = map_folded(LEN, 6);
    for (int n = 0; n < 90; n++) {
        char *block = p + (size_t)n * 7 * 16 * PAGE % (LEN - 16 * PAGE), *guard = block + (1 + n % 14) * PAGE;
        if (n % 3 == 0) NEED(madvise(block, 16 * PAGE, MADV_DONTNEED) == 0);
        if (madvise(guard, PAGE, INSTALL)) {
            NEED(errno == EINVAL); /* Before Linux 6.13. */
            return;
        }
        if (n % 3 == 1) page_out(block, 16 * PAGE, 8);
        for (char *at = block; at < block + 16 * PAGE; at += PAGE)
            if (at != guard) n % 2 ? (void)*(volatile char *)at : (void)(*(volatile char *)at = 1);
        NEED(madvise(guard, PAGE, MADV_POPULATE_READ) == -1 && errno == EFAULT);
        NEED(madvise(guard, PAGE, REMOVE) == 0);
        check_zero(guard, PAGE);
    }
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"moved_in", moved_in}, {"moved_out", moved_out}, {"replaced", replaced}, {"discarded", discarded},
        {"shrunk", shrunk}, {"grown", grown}, {"refused", refused}, {"protected", protected}, {"advised", advised},
        {"too_many_mappings", too_many_mappings}, {"grows_by_steps", grows_by_steps}, {"guarded", guarded},
    };
    return RUN_NAMED(argc, argv, all);
}
