/* shrinking KIND MIB PROCESSES: each process fills its part with data of a kind, reads it,
 * writes at random, and reads it again. Then it prints the memory of all processes. KIND is the
 * compression ratio: 48, 3, 1.3, 1 (incompressible), or half: half of the memory is excluded
 * from core dumps, so it is never folded, and the rest compresses 3 times. Prints "right TOTAL"
 * with the total in KiB. */
#pragma GCC optimize("O2")
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST = 64, LINE = 64, TOUCHES = 1000 };

static int ready[2], go[2][2];
static int words; /* random words of 8 in each line */

static void fill(uint64_t *to, uint64_t number)
{
    uint64_t state = number * 0x9e3779b97f4a7c15u + 88172645463325252u;
    for (int round = 0; round < 12; round++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        if (round < 4) continue;
        int i = round - 4;
        to[i] = words == 0 ? number >> 6 : i < words ? state : 0x1111u * i;
    }
}

/* Waits until all processes are here, so that all their memory exists at once. */
static void meet(int round)
{
    char c;
    if (write(ready[1], "x", 1) != 1 || read(go[round][0], &c, 1) != 1) _exit(3);
}

static int check(const char *at, size_t lines)
{
    uint64_t want[LINE / 8];
    for (size_t i = 0; i < lines; i++) {
        fill(want, i);
        if (memcmp(at + i * LINE, want, LINE)) return 2;
    }
    return 0;
}

static int work(size_t size, int half)
{
    char *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || (half && madvise(at, size / 2, MADV_DONTDUMP))) return 1;
    size_t lines = size / LINE;
    for (size_t i = 0; i < lines; i++) fill((uint64_t *)(at + i * LINE), i);
    meet(0);
    int bad = check(at, lines);
    uint64_t random = 7;
    for (int i = 0; i < TOUCHES; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        size_t line = (random >> 20) % lines;
        fill((uint64_t *)(at + line * LINE), line);
    }
    bad |= check(at, lines);
    meet(1);
    return bad;
}

static long resident(pid_t pid)
{
    char path[64], line[256];
    long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/status", pid);
    FILE *file = fopen(path, "r");
    while (fgets(line, sizeof line, file)) if (sscanf(line, "RssAnon: %ld", &kib) == 1) break;
    fclose(file);
    return kib;
}

int main(int n, char **arg)
{
    const char *kind = arg[1];
    int half = !strcmp(kind, "half"), count = atoi(arg[3]), bad = n != 4 || count > MOST, status;
    words = half || !strcmp(kind, "3") ? 2 : !strcmp(kind, "1.3") ? 6 : !strcmp(kind, "1") ? 8 : 0;
    size_t size = ((atol(arg[2]) << 20) / count) & -4096L;
    pid_t children[MOST];
    if (bad || pipe(ready) || pipe(go[0]) || pipe(go[1])) return 1;
    for (int i = 0; i < count; i++) if ((children[i] = fork()) == 0) _exit(work(size, half));
    long total = 0;
    char c;
    /* A dead child isn't waited for. */
    close(ready[1]);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < count; i++) bad |= read(ready[0], &c, 1) != 1;
        for (int i = 0; i < count && round == 1; i++) total += resident(children[i]);
        for (int i = 0; i < count; i++) bad |= write(go[round][1], "x", 1) != 1;
    }
    while (wait(&status) > 0) bad |= status != 0;
    printf("%s %ld\n", bad ? "WRONG" : "right", total);
    return bad;
}
