/* Processes that hold data and sleep until their input ends. Each verifies its data then. */
#include "common.h"
#include "members.h"

/* lowered KIND:MIB:COUNT. The process itself holds MIB MiB (alone), or each of COUNT children of fork
 * (fork), or each of COUNT children that execute a program (exec). The process maps a page for each
 * line of its input. */
int main(int argc, char **argv) {
    char kind[16], line[16], byte, *own = NULL;
    int mib, count, ready[2];
    NEED(argc == 2 && sscanf(argv[1], "%15[a-z]:%d:%d", kind, &mib, &count) == 3);
    size_t len = mib * MIB;
    if (is(kind, "member")) return hold_until_closed(map(len), len, count);
    NEED(pipe(ready) == 0);
    if (is(kind, "alone")) hold(own = map(len), len, 7);
    for (int n = 0; n < count && !own; n++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid) continue;
        char member[32];
        snprintf(member, sizeof member, "member:%d:%d", mib, 1000 * n);
        dup2(ready[1], 1);
        close(ready[0]), close(ready[1]);
        if (is(kind, "fork")) _exit(hold_until_closed(map(len), len, 1000 * n));
        execl(argv[0], argv[0], member, NULL);
        _exit(1);
    }
    for (int n = 0; n < count && !own; n++) NEED(read(ready[0], &byte, 1) == 1);
    printf("ready %d\n", getpid());
    fflush(stdout);
    while (own && fgets(line, sizeof line, stdin)) {
        map(PAGE);
        puts("mapped");
        fflush(stdout);
    }
    if (own) verify(own, len, 7);
    for (int n = 0; n < count && !own; n++) {
        int status;
        NEED(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 3);
    }
    puts("right");
    return 0;
}
