/* container ERRNO COMMAND...: executes COMMAND under a seccomp filter that answers the calls
 * that matter here as Docker's default profile (moby, profiles/seccomp/default.json) does for a
 * process without capabilities. `userfaultfd` fails with ERRNO: 1 (EPERM) in Docker, 38 (ENOSYS)
 * in sandboxes that refuse all unknown calls so. */
#include "filtered.h"
#include <stdlib.h>

static const struct { int call, error; } refused[] = {
    { SYS_userfaultfd, 0 },
    /* These three need CAP_SYS_PTRACE. */
    { SYS_process_madvise, EPERM }, { SYS_pidfd_getfd, EPERM }, { SYS_kcmp, EPERM },
    /* These need CAP_SYS_ADMIN. A filter can't read the flags of clone3, so Docker refuses it. */
    { SYS_clone3, ENOSYS }, { SYS_unshare, EPERM }, { SYS_setns, EPERM }, { SYS_mount, EPERM },
    { SYS_umount2, EPERM }, { SYS_bpf, EPERM }, { SYS_perf_event_open, EPERM },
    /* These need CAP_SYS_NICE. */
    { SYS_mbind, EPERM }, { SYS_set_mempolicy, EPERM }, { SYS_get_mempolicy, EPERM },
    /* Refused to all, the last three since Docker 25. */
    { SYS_keyctl, EPERM }, { SYS_add_key, EPERM }, { SYS_move_pages, EPERM },
    { SYS_io_uring_setup, EPERM }, { SYS_io_uring_enter, EPERM }, { SYS_io_uring_register, EPERM },
};
enum { COUNT = sizeof refused / sizeof *refused };

int main(int argc, char **argv) {
    struct sock_filter filter[2 * COUNT + 2];
    int len = 0, error = argc > 2 ? atoi(argv[1]) : 0;
    if (!error)
        return 99;
    filter[len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < COUNT; i++) {
        int said = refused[i].error ? refused[i].error : error;
        filter[len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused[i].call, 0, 1);
        filter[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | said);
    }
    filter[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    return become_filtered(filter, len, argv + 2);
}
