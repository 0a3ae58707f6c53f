/* Becoming another program under a seccomp filter. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Becomes the command; 99 if that fails. */
static int become_filtered(struct sock_filter *filter, int len, char **command) {
    struct sock_fprog program = { len, filter };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program)) {
        perror("seccomp");
        return 99;
    }
    execv(command[0], command);
    perror(command[0]);
    return 99;
}
