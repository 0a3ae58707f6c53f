/* lacking WHAT COMMAND...: becomes COMMAND where the kernel seems to lack Syscall User Dispatch
   (`dispatch`) or PROCMAP_QUERY (`queries`): a seccomp filter says what older ones say. */
#include "filtered.h"
#include <string.h>

#define DISPATCH 59 /* PR_SET_SYSCALL_USER_DISPATCH */
#define QUERY 0xc0686611 /* PROCMAP_QUERY */

int main(int argc, char **argv) {
    int queries = argc > 2 && !strcmp(argv[1], "queries");
    if (argc < 3 || (!queries && strcmp(argv[1], "dispatch")))
        return 99;
    int call = queries ? SYS_ioctl : SYS_prctl, error = queries ? ENOTTY : EINVAL;
    size_t word = offsetof(struct seccomp_data, args[queries ? 1 : 0]);
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, word),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, queries ? QUERY : DISPATCH, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    return become_filtered(filter, sizeof filter / sizeof *filter, argv + 2);
}
