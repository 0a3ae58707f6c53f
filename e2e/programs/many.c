/* Many processes that share one limit. Each holds data that compresses well, and the total must
 * stay within the limit. */
#include "common.h"
#include "members.h"

static size_t len;

/* many COUNT MIB LIMIT_MIB [USER]: COUNT processes with MIB MiB each, which may hold LIMIT_MIB
 * in total. USER is the first user ID if each process runs as another user. */
int main(int argc, char **argv) {
    if (argc == 4 && is(argv[1], "member")) {
        len = atol(argv[2]) * MIB;
        return hold_until_closed(map(len), len, strtoul(argv[3], NULL, 10));
    }
    NEED(argc >= 4);
    int users = argc > 4 ? atoi(argv[4]) : 0;
    len = atol(argv[2]) * MIB;
    int count = atoi(argv[1]), go[2], ready[2];
    long limit = atol(argv[3]) << 10, kib = 0;
    pid_t *pid = calloc(count, sizeof *pid);
    NEED(pipe(go) == 0 && pipe(ready) == 0);
    for (int i = 0; i < count; i++) {
        NEED((pid[i] = fork()) >= 0);
        if (pid[i]) continue;
        char seed[16];
        snprintf(seed, sizeof seed, "%d", 1000 + i * 977);
        dup2(go[0], 0);
        dup2(ready[1], 1);
        close(go[0]), close(go[1]), close(ready[0]), close(ready[1]);
        /* Each process has a user of its own, so none may signal the others. */
        if (users) NEED(setresuid(users + i, users + i, users + i) == 0);
        if (users && i % 2) _exit(hold_until_closed(map(len), len, 1000 + i * 977));
        execl(argv[0], argv[0], "member", argv[2], seed, NULL);
        _exit(1);
    }
    char byte;
    close(ready[1]);
    for (int i = 0; i < count; i++) NEED(read(ready[0], &byte, 1) == 1);
    /* Pages that were written last are folded as fast as possible. */
    for (int tries = 0; tries < 250; tries++) {
        kib = anonymous_kib(getpid());
        for (int i = 0; i < count; i++) kib += anonymous_kib(pid[i]);
        if (kib <= limit) break;
        usleep(40000);
    }
    fprintf(stderr, "anonymous memory of all processes: %ld KiB\n", kib);
    NEED(kib <= limit);
    close(go[1]);
    for (int i = 0; i < count; i++) {
        int status;
        NEED(waitpid(pid[i], &status, 0) == pid[i] && WIFEXITED(status) && WEXITSTATUS(status) == 3);
    }
    puts("right");
    return 0;
}
