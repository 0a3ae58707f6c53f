// Writes the state that a program inherits from its parent to the given file.
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

extern char **environ;

static void copy(FILE *out, const char *path, const char *const *names) {
    char line[8192];
    FILE *in = fopen(path, "re");
    while (in && fgets(line, sizeof line, in)) {
        int wanted = !names;
        for (const char *const *name = names; name && *name; name++) wanted |= !strncmp(line, *name, strlen(*name));
        if (wanted) fprintf(out, "%s: %s", path, line);
    }
    if (in) fclose(in);
}

int main(int argc, char **argv) {
    static char links[1024][256];
    static int flags[1024];
    for (int fd = 0; fd < 1024; fd++) {
        char path[64];
        sprintf(path, "/proc/self/fd/%d", fd);
        flags[fd] = fcntl(fd, F_GETFD);
        if (flags[fd] >= 0 && readlink(path, links[fd], sizeof links[fd] - 1) < 0) return 2;
    }
    FILE *out = fopen(argv[1], "we");
    if (!out) return 3;
    for (int fd = 0; fd < 1024; fd++)
        if (flags[fd] >= 0) fprintf(out, "fd %d: %s, %d\n", fd, links[fd], flags[fd]);
    for (int i = 0; i < argc; i++) fprintf(out, "argv %d: %s\n", i, argv[i]);
    for (char **e = environ; *e; e++) fprintf(out, "env: %s\n", *e);
    for (int s = 1; s < 65; s++) {
        struct sigaction now;
        if (!sigaction(s, NULL, &now))
            fprintf(out, "signal %d: %s\n", s,
                    now.sa_handler == SIG_IGN ? "ignored" : now.sa_handler == SIG_DFL ? "default" : "handled");
    }
    const char *const status[] = {"Name:",    "Umask:",      "SigBlk:",           "SigPnd:",  "ShdPnd:",  "CapInh:", "CapPrm:", "CapEff:",
                                  "CapBnd:",  "CapAmb:",     "NoNewPrivs:",       "Groups:",  "Uid:",     "Gid:",    "Seccomp:",
                                  "THP_enabled:", "Cpus_allowed_list:", "Mems_allowed_list:", NULL};
    copy(out, "/proc/self/status", status);
    copy(out, "/proc/self/limits", NULL);
    copy(out, "/proc/self/oom_score_adj", NULL);
    copy(out, "/proc/self/personality", NULL);
    copy(out, "/proc/self/coredump_filter", NULL);
    char where[4096];
    struct sched_param priority;
    sched_getparam(0, &priority);
    fprintf(out, "directory: %s\nnice: %d\npolicy: %d, %d\nio: %ld\nslack: %d\nsubreaper: ", getcwd(where, sizeof where),
            getpriority(PRIO_PROCESS, 0), sched_getscheduler(0), priority.sched_priority, syscall(SYS_ioprio_get, 1, 0),
            prctl(PR_GET_TIMERSLACK));
    int reaper = -1;
    prctl(PR_GET_CHILD_SUBREAPER, &reaper);
    fprintf(out, "%d\n", reaper);
    return fclose(out) ? 4 : 0;
}
