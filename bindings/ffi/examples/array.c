/* 256 MiB of numbers in 64 MiB of memory.
 *
 *   cc array.c $(pkg-config --cflags --libs memfold) -o array && ./array
 */
#include <memfold.h>
#include <stdio.h>
#include <stdlib.h>

static void check(memfold_status status) {
    if (status != MEMFOLD_STATUS_OK) {
        fprintf(stderr, "array: %s\n", memfold_last_error());
        exit(1);
    }
}

int main(void) {
    const size_t count = (size_t)32 << 20, bytes = count * sizeof(uint64_t);
    memfold_t memory;
    check(memfold_create("limit=64M codec=lz4", &memory));
    void *at;
    check(memfold_map(memory, bytes, &at)); /* zeros, of which nothing is in memory yet */

    uint64_t *numbers = at, sum = 0, want = 0;
    for (size_t i = 0; i < count; i++) numbers[i] = i / 1000;
    for (size_t i = 0; i < count; i++) sum += numbers[i];
    for (size_t i = 0; i < count; i++) want += i / 1000;

    memfold_stats_t stats;
    check(memfold_stats(memory, &stats, sizeof stats));
    printf("%zu MiB of data in %zu MiB; sum %llu\n", bytes >> 20, (size_t)(stats.physical_bytes >> 20),
           (unsigned long long)sum);
    check(memfold_unmap(memory, at));
    check(memfold_destroy(memory));
    return sum != want || stats.folded_bytes == 0;
}
