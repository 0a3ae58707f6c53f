/* Shared by the test programs: byte patterns that identify each page, and error messages. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)
/* Most sizes are in units, so that all of them can be changed at once. */
#define UNIT (512ul << 10)
#define NEED(x) ((x) ? (void)0 : fail(#x, __FILE__, __LINE__))

static void fail(const char *what, const char *file, int line) {
    char text[512];
    int n = snprintf(text, sizeof text, "FAILED: %s at %s:%d (errno %d %s)\n", what, file, line, errno, strerror(errno));
    (void)!write(2, text, n);
    _exit(99);
}

/* A named test of a program. */
struct test {
    const char *name;
    void (*run)(void);
};

/* See bare.h. */
static int by_instruction;

/* Runs the test that the first argument names, up to a colon. Returns the result for `main`. */
static inline int run_named(int argc, char **argv, const struct test *all, size_t count) {
    char *way = argc > 1 ? strchr(argv[1], ':') : NULL;
    if (way) by_instruction = !strcmp(way, ":bare"), *way = 0;
    for (size_t i = 0; i < count; i++)
        if (argc > 1 && !strcmp(argv[1], all[i].name)) {
            all[i].run();
            puts("right");
            return 0;
        }
    return 2;
}
#define RUN_NAMED(argc, argv, all) run_named(argc, argv, all, sizeof all / sizeof *all)

static int wait_for(pid_t pid) {
    int status;
    NEED(pid > 0 && waitpid(pid, &status, 0) == pid);
    return status;
}

/* Starts other programs with posix_spawn and system. */
static void spawn_and_system(void) {
    pid_t pid;
    char *argv[] = {"sh", "-c", "exit 8", NULL};
    NEED(posix_spawn(&pid, "/bin/sh", NULL, NULL, argv, environ) == 0);
    NEED(WEXITSTATUS(wait_for(pid)) == 8);
    NEED(WEXITSTATUS(system("exit 9")) == 9);
}

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ul;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ul;
    x = (x ^ x >> 27) * 0x94d049bb133111ebul;
    return x ^ x >> 31;
}

/* Word `w` of page `page` of the pattern `seed`. A quarter of each page is incompressible; the
 * rest repeats. */
static inline uint64_t word(uint64_t key, unsigned w) { return w < 128 ? mix(key + w) : key ^ (w & 7); }
static uint64_t page_key(uint64_t seed, uint64_t page) { return mix(seed * 0x100000001ul + page); }

/* Fills `len` bytes (whole pages) with the pages `first`, `first + 1`... of a pattern. */
static void fill_from(void *at, size_t len, uint64_t seed, uint64_t first) {
    for (size_t p = 0; p < len / PAGE; p++) {
        uint64_t *to = (uint64_t *)((char *)at + p * PAGE), key = page_key(seed, first + p);
        for (unsigned w = 0; w < PAGE / 8; w++) to[w] = word(key, w);
    }
}

/* Verifies every byte written by `fill_from`. */
static void check_from(const void *at, size_t len, uint64_t seed, uint64_t first) {
    for (size_t p = 0; p < len / PAGE; p++) {
        const uint64_t *from = (const uint64_t *)((const char *)at + p * PAGE);
        uint64_t key = page_key(seed, first + p);
        for (unsigned w = 0; w < PAGE / 8; w++)
            if (from[w] != word(key, w)) {
                char text[256];
                int n = snprintf(text, sizeof text, "WRONG: pid %d seed %lu page %lu of %lu word %u at %p: %lx, not %lx\n", getpid(),
                                 (unsigned long)seed, (unsigned long)(first + p), (unsigned long)(len / PAGE), w, (void *)(from + w),
                                 (unsigned long)from[w], (unsigned long)word(key, w));
                (void)!write(2, text, n);
                _exit(98);
            }
    }
}

static void fill(void *at, size_t len, uint64_t seed) { fill_from(at, len, seed, 0); }
static void check(const void *at, size_t len, uint64_t seed) { check_from(at, len, seed, 0); }

/* A distance between pages that prevents readahead and puts each page into a different block.
 * Pages this far apart fit into the resident limit. */
#define APART (41 * PAGE)
static inline void read_apart(const char *at, size_t len, uint64_t seed) {
    for (size_t p = 0; p < len; p += APART) check_from(at + p, PAGE, seed, p / PAGE);
}
static inline void fill_apart(char *at, size_t len, uint64_t seed) {
    for (size_t p = 0; p < len; p += APART) fill_from(at + p, PAGE, seed, p / PAGE);
}
/* Verifies pages of the pattern `seed`, except those APART from each other, which have the
 * pattern `apart`. */
static inline void check_apart(const char *at, size_t len, uint64_t seed, uint64_t apart) {
    for (size_t p = 0; p < len; p += PAGE) check_from(at + p, PAGE, p % APART ? seed : apart, p / PAGE);
}

static void check_zero(const void *at, size_t len) {
    const uint64_t *from = at;
    for (size_t w = 0; w < len / 8; w++)
        if (from[w]) {
            char text[128];
            int n = snprintf(text, sizeof text, "WRONG: %lx at %p, not zero\n", (unsigned long)from[w], (void *)(from + w));
            (void)!write(2, text, n);
            _exit(98);
        }
}

static void *map_at(void *at, size_t len, int flags) {
    void *p = mmap(at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    NEED(p != MAP_FAILED);
    return p;
}
static void *map(size_t len) { return map_at(NULL, len, 0); }

/* Counts the pages of `[at, at + len)` that are resident. */
static size_t present(void *at, size_t len) {
    int fd = open("/proc/self/pagemap", O_RDONLY);
    NEED(fd >= 0);
    size_t n = 0;
    uint64_t entry[512];
    for (size_t p = 0; p < len / PAGE; p += 512) {
        size_t many = len / PAGE - p < 512 ? len / PAGE - p : 512;
        NEED(pread(fd, entry, many * 8, ((uintptr_t)at / PAGE + p) * 8) == (ssize_t)(many * 8));
        for (size_t i = 0; i < many; i++) n += entry[i] >> 63;
    }
    close(fd);
    return n;
}

/* Pushes all memory touched before out of the page table, and asserts that. These tests are
 * about folded memory. */
static void *filler;
static void push_out(void *at, size_t len) {
    size_t want = len / PAGE / 2;
    for (int round = 0; round < 100; round++) {
        if (!filler) filler = map(48 * UNIT);
        fill(filler, 48 * UNIT, 777 + round);
        if (present(at, len) <= want) return;
        usleep(5000);
    }
    fail("memory was not folded", __FILE__, __LINE__);
}

/* Folds memory at once, so that at most `most` of its pages remain. Other memory does not push out
 * what came back from the swap cache: it is active. */
static inline void page_out(void *at, size_t len, size_t most) {
    for (int round = 0; round < 100; round++) {
        NEED(madvise(at, len, MADV_PAGEOUT) == 0);
        if (present(at, len) <= most) return;
        usleep(5000);
    }
    fail("memory was not folded", __FILE__, __LINE__);
}

/* Maps new memory, fills it with a pattern, and pushes it out. */
static inline char *map_folded(size_t len, uint64_t seed) {
    char *p = map(len);
    fill(p, len, seed);
    push_out(p, len);
    return p;
}

static int is(const char *a, const char *b) { return !strcmp(a, b); }

/* Prints the most memory of no file that this process has had resident. */
static inline void print_peak(void) {
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    long peak = 0, file = 0;
    while (fgets(line, sizeof line, status)) {
        if (!strncmp(line, "VmHWM:", 6)) peak = atol(line + 6);
        if (!strncmp(line, "RssFile:", 8)) file = atol(line + 8);
    }
    fclose(status);
    fprintf(stderr, "peak of anonymous memory: %ld KiB\n", peak - file);
}
