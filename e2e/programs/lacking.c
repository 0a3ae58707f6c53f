/* lacking WHAT COMMAND...: executes COMMAND where the kernel seems to lack a feature, under a
 * seccomp filter that returns the errors of older kernels. WHAT is `dispatch` (no Syscall User
 * Dispatch), `moves` (Linux 6.6: no UFFDIO_MOVE, PAGEMAP_SCAN or PROCMAP_QUERY, and no
 * process_madvise that drops pages), or `nowait` (no RWF_NOWAIT for pipes). */
#include "filtered.h"
#include <string.h>

static const struct {
    const char *what;
    unsigned call, argument, value, error;
} lacks[] = {
    {"dispatch", SYS_prctl, 0, 59 /* PR_SET_SYSCALL_USER_DISPATCH */, EINVAL},
    {"moves", SYS_ioctl, 1, 0xc028aa05 /* UFFDIO_MOVE */, EINVAL},
    {"moves", SYS_ioctl, 1, 0xc0606610 /* PAGEMAP_SCAN */, ENOTTY},
    {"moves", SYS_ioctl, 1, 0xc0686611 /* PROCMAP_QUERY */, ENOTTY},
    {"moves", SYS_process_madvise, 3, 4 /* MADV_DONTNEED */, EINVAL},
    {"nowait", SYS_pwritev2, 5, 8 /* RWF_NOWAIT */, EOPNOTSUPP},
};

int main(int argc, char **argv) {
    struct sock_filter filter[64];
    unsigned len = 0;
    for (unsigned n = 0; argc > 2 && n < sizeof lacks / sizeof *lacks; n++) {
        if (strcmp(argv[1], lacks[n].what))
            continue;
        struct sock_filter one[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, lacks[n].call, 0, 3),
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0]) + 8 * lacks[n].argument),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, lacks[n].value, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | lacks[n].error),
        };
        memcpy(filter + len, one, sizeof one);
        len += sizeof one / sizeof *one;
    }
    if (!len)
        return 99;
    filter[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    return become_filtered(filter, len, argv + 2);
}
