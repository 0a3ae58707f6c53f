// Executes another program with a different environment, or prints the environment that it was
// given.
#include "common.h"
#include <link.h>
#include <sys/auxv.h>

extern char **environ;

/* Finds the environment as programs do that look for the auxiliary vector behind arguments and
 * environment, such as those in Go. */
static void show(char **argv) {
    for (char **e = environ; *e; e++) printf("%s\n", *e);
    char **at = argv;
    while (*at++) {}
    for (char **e = environ; *at; at++, e++) NEED(*at == *e);
    ElfW(auxv_t) *found = (ElfW(auxv_t) *)(at + 1);
    while (found->a_type != AT_NULL && found->a_type != AT_RANDOM) found++;
    NEED(found->a_type == AT_RANDOM && found->a_un.a_val == getauxval(AT_RANDOM));
}

static void wait_child(pid_t child) {
    int status;
    NEED(waitpid(child, &status, 0) == child);
    if (status) _exit(WEXITSTATUS(status) ? WEXITSTATUS(status) : 98);
}

int main(int argc, char **argv) {
    char *none[] = {NULL};
    const char *how = argc > 1 ? argv[1] : "show";
    if (!strcmp(how, "show")) {
        show(argv);
        return 0;
    }
    if (!strcmp(how, "null")) return execve(argv[2], argv + 2, NULL), 97;
    if (!strcmp(how, "empty")) return execve(argv[2], argv + 2, none), 97;
    if (!strcmp(how, "at")) return syscall(SYS_execveat, open(argv[2], O_PATH | O_CLOEXEC), "", argv + 2, none, 0x1000), 97;
    if (!strcmp(how, "vfork")) {
        /* Memory allocated for a call is freed if the call fails, or if it succeeds in a child
         * that shares the memory. */
        for (int i = 0; i < 300; i++) {
            pid_t child = vfork();
            if (!child) {
                execve("/no/such/program", argv + 2, none);
                execve(i < 299 ? "/bin/true" : argv[2], argv + 2, none);
                _exit(97);
            }
            wait_child(child);
        }
        return 0;
    }
    if (!strcmp(how, "spawn")) {
        pid_t child;
        NEED(!posix_spawn(&child, argv[2], NULL, NULL, argv + 2, none));
        wait_child(child);
        return 0;
    }
    /* The number of entries, which must arrive in order. */
    int count = atoi(how);
    char **many = calloc(count + 1, sizeof *many), (*text)[16] = calloc(count, sizeof *text);
    for (int i = 0; i < count; i++) sprintf(many[i] = text[i], "V%d=%d", i, i);
    return execve(argv[2], argv + 2, many), 97;
}
