/* Processes that sleep, and processes that share memory after a fork. They run until they are
 * killed, or for some seconds. Numbers are arguments: the promise, MiB, children, seconds. */
#include "common.h"

static size_t len;
static int children, seconds;
static char *memory;

static void ready(void) {
    printf("ready %d\n", getpid());
    fflush(stdout);
}

/* All sleep. */
static void all(void) {
    for (int n = 0; n < children; n++)
        if (fork() == 0) {
            for (;;) pause();
        }
    ready();
    for (;;) pause();
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Children make an eighth private, and then work in it without a fault. */
static void busy(void) {
    for (int n = 0; n < children; n++)
        if (fork() == 0) {
            size_t part = len / 8;
            fill(memory, part, 2);
            for (double end = now() + seconds; now() < end;) check(memory, part, 2);
            _exit(0);
        }
    for (int status; wait(&status) > 0;) NEED(status == 0);
    puts("right");
}

/* A process that has slept for long grows past its limit. */
static void grows(void) {
    char *more = map(len);
    fill(more, MIB, 2);
    sleep(seconds);
    fill(more, len, 3);
    check(memory, len, 1);
    check(more, len, 3);
    puts("right");
}

int main(int argc, char **argv) {
    NEED(argc == 5);
    len = (size_t)atoi(argv[2]) * MIB;
    children = atoi(argv[3]);
    seconds = atoi(argv[4]);
    memory = map(len);
    fill(memory, len, 1);
    if (is(argv[1], "all")) all();
    if (is(argv[1], "busy")) busy();
    if (is(argv[1], "grows")) grows();
    return 0;
}
