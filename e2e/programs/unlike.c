/* unlike STIFF SOFT MOST: two processes. One has STIFF MiB of incompressible data, the other SOFT
 * MiB that compress 3 times. Each fills its part, reads it when both are full, and reads it again.
 * Prints "right TOTAL" with the memory of both, in KiB, as soon as that is at most MOST KiB. It
 * waits for that, because on a busy machine a process folds only when it runs. */
#pragma GCC optimize("O2")
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t word(size_t i, int words)
{
    uint64_t x = i * 0x9e3779b97f4a7c15u;
    x ^= x >> 29, x *= 0xbf58476d1ce4e5b9u, x ^= x >> 32;
    return i % 8 < words ? x : 0x1111u * (i % 8);
}

static long resident(pid_t pid)
{
    char path[64], line[256];
    long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) if (sscanf(line, "RssAnon: %ld", &kib) == 1) break;
    fclose(file);
    return kib;
}

int main(int n, char **arg)
{
    int up[2], down[2], status, bad = 0;
    signal(SIGPIPE, SIG_IGN); /* if the other end is closed */
    if (n != 4 || pipe(up) || pipe(down)) return 1;
    pid_t child = fork();
    int words = child ? 2 : 8, in = child ? up[0] : down[0], out = child ? down[1] : up[1];
    close(child ? up[1] : down[1]);
    close(child ? down[0] : up[0]);
    size_t count = (atol(arg[child ? 2 : 1]) << 20) / 8;
    uint64_t *at = mmap(0, count * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return 1;
    for (size_t i = 0; i < count; i++) at[i] = word(i, words);
    for (int round = 0; round < 2; round++) {
        char c;
        if (write(out, "x", 1) != 1 || read(in, &c, 1) != 1) _exit(3);
        for (size_t i = 0; i < count; i++) bad |= at[i] != word(i, words);
    }
    if (!child) {
        char c;
        if (write(out, "x", 1) != 1 || read(in, &c, 1) != 1) _exit(3);
        _exit(bad);
    }
    char c;
    bad |= read(in, &c, 1) != 1;
    long total = 0;
    for (int tries = 0; tries < 600; tries++, usleep(50000))
        if ((total = resident(child) + resident(getpid())) <= atol(arg[3])) break;
    bad |= write(out, "x", 1) != 1;
    bad |= wait(&status) != child || status != 0;
    printf("%s %ld\n", bad ? "WRONG" : "right", total);
    return bad;
}
