/* sharing WAY MIB COUNT ROUNDS: a program whose children use memory that they share with it.
 *   read    COUNT children read all of MIB
 *   write   COUNT children write one byte in each of MIB
 *   copy    COUNT children write to each page of MIB, and sleep
 *   spawn   COUNT times a child executes another program
 *   idle    COUNT children fill MIB of their own each, and wait until the input ends
 *   change  MIB that hardly compress are touched at random, and then as much as COUNT times MIB that compress well are
 *           held. Prints the MiB that are resident at the end. */
#include "common.h"
#include "members.h"

enum { STEP = 64 };
static char *memory;
static size_t len;

/* Fills memory of which a quarter, or three quarters, of each line is random. */
static void fill_lines(char *at, size_t bytes, uint64_t seed, unsigned random) {
    for (size_t a = 0; a < bytes; a += STEP)
        for (unsigned w = 0; w < 8; w++) *(uint64_t *)(at + a + 8 * w) = w < random ? mix(seed + a + w) : seed + a / PAGE;
}
static void check_lines(const char *at, size_t bytes, uint64_t seed, unsigned random) {
    for (size_t a = 0; a < bytes; a += STEP)
        for (unsigned w = 0; w < 8; w++)
            NEED(*(const uint64_t *)(at + a + 8 * w) == (w < random ? mix(seed + a + w) : seed + a / PAGE));
}

static void reads(int rounds) {
    for (int round = 0; round < rounds; round++) {
        for (size_t a = 0; a < len; a += PAGE) NEED(*(volatile uint64_t *)(memory + a) == mix(1 + a));
        usleep(50000);
    }
}

static void writes(int rounds) {
    for (int round = 0; round < rounds; round++) {
        for (size_t a = 0; a < len; a += MIB) memory[a + 63]++;
        usleep(50000);
    }
    for (size_t a = 0; a < len; a += MIB) memory[a + 63] -= rounds;
    check_lines(memory, len, 1, 2);
}

static void copies(int rounds) {
    for (size_t a = 0; a < len; a += PAGE) memory[a + 63]++;
    usleep(50000 * rounds);
    for (size_t a = 0; a < len; a += PAGE) memory[a + 63]--;
    check_lines(memory, len, 1, 2);
}

static void idles(void) {
    char byte;
    char *own = map(len);
    fill_lines(own, len, getpid(), 2);
    NEED(read(0, &byte, 1) == 0);
    check_lines(own, len, getpid(), 2);
}

static void change(unsigned times, int rounds) {
    fill_lines(memory, len, 1, 6);
    for (uint64_t i = 0; i < rounds * 1000ul; i++) {
        size_t at = mix(i) % len & ~63ul;
        NEED(*(volatile uint64_t *)(memory + at) == mix(1 + at));
    }
    fprintf(stderr, "before the change: %ld MiB\n", anonymous_kib(getpid()) / 1024);
    NEED(munmap(memory, len) == 0);
    char *next = map(len * times);
    hold(next, len * times, 3);
    for (int round = 0; round < 8; round++) verify(next, len * times, 3);
    printf("%ld\n", anonymous_kib(getpid()) / 1024);
}

int main(int argc, char **argv) {
    NEED(argc == 5);
    const char *way = argv[1];
    int count = atoi(argv[3]), rounds = atoi(argv[4]);
    len = strtoul(argv[2], NULL, 10) * MIB;
    int idle = is(way, "idle"), spawn = is(way, "spawn");
    if (!idle) memory = map(len);
    if (is(way, "change")) return change(count, rounds), 0;
    if (spawn) hold(memory, len, 1);
    else if (!idle) fill_lines(memory, len, 1, 2);
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid) {
            if (spawn) NEED(wait_for(pid) == 0);
            continue;
        }
        if (spawn) execl("/bin/true", "true", NULL);
        if (idle) idles();
        else if (is(way, "copy")) copies(rounds);
        else if (is(way, "read")) reads(rounds);
        else writes(rounds);
        _exit(spawn);
    }
    for (int i = 0; i < count && !spawn; i++) {
        int status;
        NEED(wait(&status) > 0 && status == 0);
    }
    if (spawn) verify(memory, len, 1);
    else if (!idle) check_lines(memory, len, 1, 2);
    puts("right");
    return 0;
}
