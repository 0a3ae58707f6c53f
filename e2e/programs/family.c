/* Processes that share one limit. Each holds data, and the total must stay within the limit. */
#include "common.h"
#include "members.h"

enum { MEMBERS = 4 };
static const size_t LEN = 96 * MIB;

int main(int argc, char **argv) {
    if (argc == 3) return hold_until_closed(map(LEN), LEN, strtoul(argv[2], NULL, 10));
    NEED(argc == 2);
    int execute = is(argv[1], "exec"), rewrite = is(argv[1], "rewrite"), go[2], ready[2];
    char *common = rewrite ? map(LEN) : NULL;
    if (rewrite) hold(common, LEN, 999);
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
        _exit(execute ? 1 : hold_until_closed(rewrite ? common : map(LEN), LEN, 1000 + i));
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
    if (rewrite) verify(common, LEN, 999);
    puts("right");
    return 0;
}
