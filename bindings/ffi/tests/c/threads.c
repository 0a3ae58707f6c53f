/* Threads map, fill, check and unmap in one memory at once, past its limit; and system calls are given what is folded. The argument is the
 * delivery: with "signal" it is pinned around the call. */
#include "test.h"
#include <pthread.h>
#include <unistd.h>

enum { THREADS = 4, ROUNDS = 12, BYTES = 9 << 20 };
static memfold_t memory;

static void *work(void *argument) {
    const unsigned seed = (unsigned)(size_t)argument;
    for (unsigned round = 0; round < ROUNDS; round++) {
        void *at;
        OK(memfold_map(memory, BYTES, &at));
        unsigned *numbers = at;
        for (unsigned i = 0; i < BYTES / sizeof *numbers; i++) numbers[i] = (i / 64) * seed + round;
        for (unsigned i = 0; i < BYTES / sizeof *numbers; i++) CHECK(numbers[i] == (i / 64) * seed + round);
        OK(memfold_unmap(memory, at));
    }
    return NULL;
}

static void give_to_the_kernel(int is_signal) {
    void *at;
    char got[4096];
    int ends[2];
    OK(memfold_map(memory, 65536, &at));
    memset(at, 'x', 65536);
    OK(memfold_fold(memory, at, 65536));
    CHECK(pipe(ends) == 0);
    if (is_signal) {
        CHECK(write(ends[1], at, sizeof got) == -1);
        OK(memfold_pin(memory, at, sizeof got));
    }
    CHECK(write(ends[1], at, sizeof got) == sizeof got);
    if (is_signal) OK(memfold_unpin(memory, at, sizeof got));
    CHECK(read(ends[0], got, sizeof got) == sizeof got && got[4095] == 'x');
    OK(memfold_unmap(memory, at));
}

int main(int count, char **arguments) {
    const char *delivery = count > 1 ? arguments[1] : "thread";
    char settings[100];
    snprintf(settings, sizeof settings, "limit=20M delivery=%s", delivery);
    OK(memfold_create(settings, &memory));
    give_to_the_kernel(strcmp(delivery, "signal") == 0);
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (size_t i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    memfold_stats_t stats;
    OK(memfold_stats(memory, &stats, sizeof stats));
    CHECK(stats.mapped_bytes == 0 && stats.folded_bytes == 0 && stats.faults > 0);
    OK(memfold_destroy(memory));
    return 0;
}
