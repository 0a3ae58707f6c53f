/* What doesn't shrink goes to the swap file. When that is full it stays in memory, past the limit, and every byte is right. */
#define _DEFAULT_SOURCE /* mkdtemp */
#include "test.h"
#include <unistd.h>

enum { BYTES = 64 << 20 };

/* Numbers without a pattern, always the same. */
static uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void fill_and_check(const char *settings, memfold_stats_t *stats) {
    memfold_t memory;
    void *at;
    OK(memfold_create(settings, &memory));
    OK(memfold_map(memory, BYTES, &at));
    uint64_t *numbers = at, state = 88172645463325252u;
    for (size_t i = 0; i < BYTES / sizeof *numbers; i++) numbers[i] = next(&state);
    state = 88172645463325252u;
    for (size_t i = 0; i < BYTES / sizeof *numbers; i++) CHECK(numbers[i] == next(&state));
    OK(memfold_stats(memory, stats, sizeof *stats));
    OK(memfold_destroy(memory));
}

int main(void) {
    char directory[] = "/tmp/memfold-swap-XXXXXX", settings[200];
    memfold_stats_t stats;
    CHECK(mkdtemp(directory));
    snprintf(settings, sizeof settings, "limit=16M swap=%s swap-size=1G swap-keep-free=1M", directory);
    fill_and_check(settings, &stats);
    CHECK(stats.swap_bytes > 32 << 20 && stats.physical_bytes <= 16 << 20);
    snprintf(settings, sizeof settings, "limit=16M swap=%s swap-size=8M swap-keep-free=1M", directory);
    fill_and_check(settings, &stats);
    CHECK(stats.swap_bytes > 0 && stats.swap_bytes <= 8 << 20 && stats.over_limit > 0 && stats.physical_bytes > 16 << 20);
    /* The file has no name, so nothing is left. */
    CHECK(rmdir(directory) == 0);
    return 0;
}
