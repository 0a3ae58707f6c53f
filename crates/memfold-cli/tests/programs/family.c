/* Processes that share one limit: each holds data, and all of them together must stay within it. */
#include "common.h"

enum { MEMBERS = 4 };
static const size_t LEN = 96 * MIB;

/* Pages that shrink to a tenth. */
static void hold(char *at, uint64_t seed) {
    for (size_t p = 0; p < LEN; p += PAGE)
        for (unsigned w = 0; w < 40; w++) ((uint64_t *)(at + p))[w] = mix(seed + p * 64 + w);
}
static void verify(const char *at, uint64_t seed) {
    for (size_t p = 0; p < LEN; p += PAGE)
        for (unsigned w = 0; w < 40; w++) NEED(((uint64_t *)(at + p))[w] == mix(seed + p * 64 + w));
}

/* Fills what it has from its parent, or memory of its own; says so, and verifies when the parent has closed its pipe. */
static int member(char *at, uint64_t seed) {
    char byte = 1;
    hold(at, seed);
    NEED(write(1, &byte, 1) == 1);
    NEED(read(0, &byte, 1) == 0);
    verify(at, seed);
    return 3;
}

/* What several have is counted once in all. */
static long anonymous_kib(pid_t pid) {
    char path[64], line[256];
    long kib = 0;
    snprintf(path, sizeof path, "/proc/%d/smaps_rollup", pid);
    FILE *rollup = fopen(path, "r");
    while (rollup && fgets(line, sizeof line, rollup))
        if (!strncmp(line, "Pss_Anon:", 9)) kib = atol(line + 9);
    if (rollup) fclose(rollup);
    return kib;
}

int main(int argc, char **argv) {
    if (argc == 3) return member(map(LEN), strtoul(argv[2], NULL, 10));
    NEED(argc == 2);
    int execute = is(argv[1], "exec"), rewrite = is(argv[1], "rewrite"), go[2], ready[2];
    char *common = rewrite ? map(LEN) : NULL;
    if (rewrite) hold(common, 999);
    pid_t pid[MEMBERS];
    NEED(pipe(go) == 0 && pipe(ready) == 0);
    for (int i = 0; i < MEMBERS; i++) {
        NEED((pid[i] = fork()) >= 0);
        if (pid[i]) continue;
        char seed[16];
        snprintf(seed, sizeof seed, "%d", 1000 + i);
        dup2(go[0], 0);
        dup2(ready[1], 1);
        close(go[0]), close(go[1]), close(ready[0]), close(ready[1]);
        if (execute) execl(argv[0], argv[0], "member", seed, NULL);
        _exit(execute ? 1 : member(rewrite ? common : map(LEN), 1000 + i));
    }
    char byte;
    for (int i = 0; i < MEMBERS; i++) NEED(read(ready[0], &byte, 1) == 1);
    long kib = 0;
    for (int tries = 0; tries < 250; tries++) {
        kib = anonymous_kib(getpid());
        for (int i = 0; i < MEMBERS; i++) kib += anonymous_kib(pid[i]);
        if (kib < 128 << 10) break;
        usleep(20000);
    }
    fprintf(stderr, "anonymous memory of all processes: %ld KiB\n", kib);
    NEED(kib <= (128 + 16) << 10);
    close(go[1]);
    for (int i = 0; i < MEMBERS; i++) {
        int status;
        NEED(waitpid(pid[i], &status, 0) == pid[i] && WIFEXITED(status) && WEXITSTATUS(status) == 3);
    }
    if (rewrite) verify(common, 999);
    puts("right");
    return 0;
}
