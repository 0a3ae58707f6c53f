/* overshoot WAY MIB: allocates so much as fast as it can. */
#include "bare.h"

/* Faster variants of `fill` and `check`, for pages that compress to a tenth. */
static void quick_fill(char *at, size_t len, uint64_t seed) {
    for (size_t p = 0; p < len; p += PAGE)
        for (unsigned w = 0; w < 40; w++) ((uint64_t *)(at + p))[w] = mix(seed + p * 64 + w);
}
static void quick_check(const char *at, size_t len, uint64_t seed) {
    for (size_t p = 0; p < len; p += PAGE)
        for (unsigned w = 0; w < PAGE / 8; w++) NEED(((uint64_t *)(at + p))[w] == (w < 40 ? mix(seed + p * 64 + w) : 0));
}

static void *allocate(const char *way, size_t len) {
    if (is(way, "malloc") || is(way, "large")) return calloc(1, len);
    if (is(way, "brk")) return sbrk(len);
    if (is(way, "populate") || is(way, "populate_small")) return map_at(NULL, len, MAP_POPULATE);
    if (is(way, "populate_reserve")) return map_at(NULL, len, MAP_POPULATE | MAP_NORESERVE);
    if (is(way, "advise") || is(way, "advise_reserve")) {
        void *at = map_at(NULL, len, is(way, "advise") ? 0 : MAP_NORESERVE);
        NEED(madvise(at, len, MADV_POPULATE_WRITE) == 0);
        return at;
    }
    void *at = (void *)syscall(SYS_mmap, 0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? NULL : at;
}

int main(int argc, char **argv) {
    NEED(argc == 3);
    const size_t len = strtoul(argv[2], NULL, 10) * MIB;
    char *bare = strchr(argv[1], ':');
    if (bare) by_instruction = is(bare, ":bare"), *bare = 0;
    int at_once = is(argv[1], "large") || is(argv[1], "populate") || is(argv[1], "populate_reserve") || !strncmp(argv[1], "advise", 6);
    size_t step = at_once ? len : is(argv[1], "malloc") ? 64 << 10 : 4 * MIB, count = len / step;
    char **part = calloc(count, sizeof *part);
    for (size_t i = 0; i < count; i++) {
        NEED(part[i] = allocate(argv[1], step));
        part[i] += -(uintptr_t)part[i] % 16;
        quick_fill(part[i], step - PAGE, i);
    }
    for (size_t i = 0; i < count; i++) quick_check(part[i], step - PAGE, i);
    print_peak();
    puts("right");
    return 0;
}
