/* Programs without a limit: what they don't use is folded. */
#include "common.h"
#include <sched.h>
#include <sys/resource.h>

static const size_t LEN = 96 * UNIT;

/* Does `work` until at most `most` pages are present. */
static void await(void *at, size_t len, size_t most, void (*work)(void), int rounds) {
    for (int round = 0; round < rounds; round++) {
        if (present(at, len) <= most) return;
        work();
    }
    fail("memory was not folded", __FILE__, __LINE__);
}

static char *memory;

/* A working program keeps the tenth that it uses, and nothing of the rest is lost. */
static void use_a_tenth(void) {
    for (int i = 0; i < 3; i++) check(memory, LEN / 10 / PAGE * PAGE, 1);
}
static void used(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    await(memory, LEN, LEN / PAGE / 2, use_a_tenth, 200000);
    check(memory, LEN, 1);
    fill(memory, LEN, 2);
    check(memory, LEN, 2);
}

/* An idle program keeps next to nothing, and has all of it when it works again. */
static void sleep_a_while(void) { sleep(2); }
static void idle(void) {
    memory = map(LEN);
    fill(memory, LEN, 3);
    for (int round = 0; round < 2; round++) {
        await(memory, LEN, LEN / PAGE / 5, sleep_a_while, 100);
        check(memory, LEN, 3 + round);
        fill(memory, LEN, 4 + round);
    }
    check(memory, LEN, 5);
}

/* Returns how many MiB of this process are in huge pages. */
static size_t huge_mib(void) {
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    char line[256];
    long kib = -1;
    NEED(file);
    while (kib < 0 && fgets(line, sizeof line, file)) sscanf(line, "AnonHugePages: %ld", &kib);
    NEED(fclose(file) == 0 && kib >= 0);
    return kib >> 10;
}

/* Huge pages that were folded are huge pages again when all of them is in memory: read, written, and
 * touched at random. A kernel may make none. */
static void huge(void) {
    memory = map_at(NULL, LEN, 0);
    NEED(madvise(memory, LEN, MADV_HUGEPAGE) == 0);
    fill(memory, LEN, 10);
    size_t before = huge_mib();
    if (before < LEN / MIB / 2) return;
    for (int round = 0; round < 3; round++) {
        await(memory, LEN, LEN / PAGE / 5, sleep_a_while, 100);
        NEED(huge_mib() < before / 2);
        for (int tries = 0; huge_mib() < before - before / 8; tries++) {
            NEED(tries < 2500);
            if (round == 2 && tries == 0)
                for (size_t n = 0; n < 8 * LEN / PAGE; n++) *(volatile char *)(memory + mix(n) % LEN);
            check(memory, LEN, 10 + (round == 2));
            usleep(100000);
        }
        if (round == 1) fill(memory, LEN, 11);
    }
    check(memory, LEN, 11);
}

/* Memory that comes and goes meanwhile, in children too. */
static void changes(void) {
    memory = map(LEN);
    fill(memory, LEN, 6);
    await(memory, LEN, LEN / PAGE / 5, sleep_a_while, 100);
    char *more = map(8 * UNIT);
    fill(more, 8 * UNIT, 7);
    NEED(mremap(memory, 16 * UNIT, 8 * UNIT, 0) == memory);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        check_from(memory + 16 * UNIT, LEN - 16 * UNIT, 6, 16 * UNIT / PAGE);
        _exit(7);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 7);
    check(memory, 8 * UNIT, 6);
    check(more, 8 * UNIT, 7);
    NEED(munmap(more, 8 * UNIT) == 0);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}
static double worked(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Touches pages at random until the thread has worked for so long. */
static void touch_for(double seconds) {
    static uint64_t at = 1;
    for (double end = worked() + seconds; worked() < end;)
        for (int i = 0; i < 20; i++) {
            at = mix(at);
            *(volatile char *)(memory + at % LEN);
        }
}

/* A program that always has work, and gets one hundredth of a CPU for it: another process of a
 * higher priority has the rest. */
static void starved(void) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    memory = map(LEN);
    fill(memory, LEN, 8);
    pid_t pid = fork();
    NEED(pid >= 0 && sched_setaffinity(0, sizeof one, &one) == 0);
    double end = now() + 14;
    if (pid == 0) {
        while (now() < end) {}
        _exit(7);
    }
    NEED(setpriority(PRIO_PROCESS, 0, 19) == 0);
    while (now() < end) touch_for(0.001);
    NEED(WEXITSTATUS(wait_for(pid)) == 7);
    check(memory, LEN, 8);
}

/* A program that works for 4 ms of each 100, as under cpulimit, and uses all of its memory. */
static void limited(void) {
    memory = map(LEN);
    fill(memory, LEN, 9);
    for (double end = now() + 14; now() < end; usleep(96000)) touch_for(0.004);
    check(memory, LEN, 9);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"used", used},       {"idle", idle},       {"changes", changes},
        {"starved", starved}, {"limited", limited}, {"huge", huge},
    };
    return RUN_NAMED(argc, argv, all);
}
