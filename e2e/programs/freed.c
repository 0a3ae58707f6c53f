/* Memory given up with MADV_FREE. Each page has its old bytes or zeros until it is written to,
 * and never its old bytes after it was zeros. A thread makes the kernel drop all such pages,
 * memfold's own memory included. */
#include "common.h"
#include <sys/prctl.h>

static const size_t LEN = 40 * UNIT;

/* Makes the call by an instruction, without libc. */
static long bare(long number, long a, long b, long c) {
#ifdef __x86_64__
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
#else
    register long x8 __asm__("x8") = number, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2) : "memory");
    return x0;
#endif
}
static int bare_free(void *at, size_t len) { return (int)bare(SYS_madvise, (long)at, len, MADV_FREE); }
static int libc_free(void *at, size_t len) { return madvise(at, len, MADV_FREE); }
static int number_free(void *at, size_t len) { return (int)syscall(SYS_madvise, at, len, MADV_FREE); }
/* A process can do that to itself from Linux 6.13 on. */
static int process_free(void *at, size_t len) {
    struct iovec halves[] = {{at, len / 2}, {(char *)at + len / 2, len - len / 2}};
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    NEED(self >= 0);
    long done = syscall(SYS_process_madvise, self, halves, 2, MADV_FREE, 0);
    int failed = errno;
    NEED(syscall(SYS_process_madvise, self, halves, 1, 12345, 0) == -1 && errno == EINVAL);
    close(self);
    if (done < 0 && failed == EINVAL) return madvise(at, len, MADV_FREE);
    NEED(done == (long)len);
    return 0;
}

/* A range of the program where the kernel drops nothing. So its pages still have their old bytes
 * after they were moved. */
static volatile uintptr_t spared, spared_end;

/* Makes the kernel reclaim memory. Without swap it can drop only pages given up with MADV_FREE. */
static void drop_all(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    NEED(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char access[5];
        NEED(sscanf(line, "%lx-%lx %4s", &start, &end, access) == 3);
        if (!is(access, "rw-p")) continue;
        if (start < spared && spared < end) bare(SYS_madvise, start, spared - start, MADV_PAGEOUT);
        if (start < spared_end && spared < end) start = spared_end;
        if (start < end) bare(SYS_madvise, start, end - start, MADV_PAGEOUT);
    }
    fclose(maps);
}
static volatile int stop;
static void *drop_until_stopped(void *arg) {
    /* With pauses, because the kernel scans every page for this, and no page can be moved
     * meanwhile. */
    while (!stop) drop_all(), usleep(3000);
    return arg;
}

/* Which pages may still have their old bytes. */
static char kept[40 * UNIT / PAGE];

/* Page `p` of the range is page `was` of the pattern `seed`, or zeros. It may become zeros while
 * it is read. */
static void check_page(char *at, size_t p, uint64_t seed, uint64_t was) {
    volatile uint64_t *word_at = (uint64_t *)(at + p * PAGE);
    uint64_t key = page_key(seed, was);
    for (unsigned w = 0; w < PAGE / 8; w++) {
        uint64_t found = word_at[w];
        if (found == 0) kept[p] = 0;
        NEED(found == (kept[p] ? word(key, w) : 0));
    }
}
static void check_freed(char *at, size_t len, uint64_t seed, uint64_t first) {
    for (size_t p = 0; p < len / PAGE; p++) check_page(at, p, seed, first + p);
}

/* Reads the range, writes to it, pushes it out and reads it again. It began as the pages
 * `first`... of the pattern `was`. */
static void use(char *at, size_t len, uint64_t was, uint64_t first, uint64_t seed) {
    check_freed(at, len, was, first);
    push_out(filler, 48 * UNIT);
    for (size_t p = 0; p < len / PAGE; p += 2) fill_from(at + p * PAGE, PAGE, seed + 1, p);
    for (int round = 0; round < 2; round++) {
        for (size_t p = 0; p < len / PAGE; p++)
            if (p % 2) check_page(at, p, was, first + p);
            else check_from(at + p * PAGE, PAGE, seed + 1, p);
        push_out(filler, 48 * UNIT);
    }
    /* From here on it is ordinary memory. */
    fill(at, len, seed);
    push_out(filler, 48 * UNIT);
    check(at, len, seed);
}

/* Gives up memory of which a part is folded. */
static void managed(int (*give_up)(void *, size_t)) {
    char *p = map_folded(LEN, 21);
    /* If memfold sees the call, it discards the pages, so no unmanageable page remains. A fault
     * in progress may still map zeros afterwards. */
    char *q = map(UNIT);
    fill(q, UNIT, 20);
    NEED(!give_up(q, UNIT) && (give_up == bare_free || present(q, UNIT) < UNIT / PAGE / 2));
    pthread_t other;
    NEED(!pthread_create(&other, NULL, drop_until_stopped, NULL));
    for (uint64_t round = 0; round < 2; round++) {
        memset(kept, 1, sizeof kept);
        NEED(!give_up(p + 5 * PAGE, LEN / 2));
        use(p + 5 * PAGE, LEN / 2, round ? 99 + round : 21, round ? 0 : 5, 100 + round);
        check_from(p, 5 * PAGE, 21, 0);
        check_from(p + 5 * PAGE + LEN / 2, LEN / 2 - 5 * PAGE, 21, 5 + LEN / 2 / PAGE);
    }
    stop = 1;
    NEED(!pthread_join(other, NULL));
}

/* Gives up memory before the program is managed, while it is small. */
static void before(void) {
    size_t len = 8 * UNIT;
    char *p = map(len);
    fill(p, len, 41);
    memset(kept, 1, sizeof kept);
    NEED(!bare_free(p, len));
    /* Half of the pages are written again, so they stay. */
    for (size_t at = 0; at < len; at += 2 * PAGE) fill_from(p + at, PAGE, 41, at / PAGE);
    spared = (uintptr_t)p, spared_end = spared + len;
    pthread_t other;
    NEED(!pthread_create(&other, NULL, drop_until_stopped, NULL));
    push_out(map_folded(8 * UNIT, 42), 8 * UNIT);
    push_out(p, len);
    spared = spared_end = 0;
    for (int round = 0; round < 3; round++) {
        push_out(filler, 48 * UNIT);
        for (size_t at = 0; at < len; at += 2 * PAGE) check_from(p + at, PAGE, 41, at / PAGE);
        for (size_t page = 1; page < len / PAGE; page += 2) check_page(p, page, 41, page);
    }
    fill(p, len, 43);
    for (int round = 0; round < 2; round++) push_out(p, len), check(p, len, 43);
    stop = 1;
    NEED(!pthread_join(other, NULL));
}

static void by_libc(void) { managed(libc_free); }
static void by_number(void) { managed(number_free); }
static void by_process(void) { managed(process_free); }
static void past_libc(void) { managed(bare_free); }

/* Where MADV_FREE fails, memfold must not discard either. */
static void refused(void) {
    char *p = map_folded(LEN, 51), name[] = "/tmp/memfold-test-XXXXXX";
    int file = mkstemp(name);
    NEED(file >= 0 && !unlink(name) && !ftruncate(file, UNIT));
    char *own = mmap(NULL, UNIT, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    NEED(own != MAP_FAILED);
    fill(own, UNIT, 52);
    NEED(madvise(own, UNIT, MADV_FREE) == -1 && errno == EINVAL);
    check(own, UNIT, 52);
    check(p, LEN, 51);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"before", before},       {"by_libc", by_libc},     {"by_number", by_number},
        {"by_process", by_process}, {"past_libc", past_libc}, {"refused", refused},
    };
    return RUN_NAMED(argc, argv, all);
}
