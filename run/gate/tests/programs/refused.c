/* A filter of the program's own says SIGSYS (SECCOMP_RET_TRAP), and its handler makes the call's
   result: at an instruction of its own and at one of libc's, in threads and processes too. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef SYS_SECCOMP
#define SYS_SECCOMP 1
#endif
enum { DATA = 77, CALLS = 30 };

static __thread long seen, wrong;

static void on_refused(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    sigset_t now;
    sigprocmask(SIG_BLOCK, NULL, &now);
    unsigned char *after = (unsigned char *)regs[REG_RIP];
    wrong += signal != SIGSYS || info->si_code != SYS_SECCOMP || info->si_errno != DATA;
    wrong += info->si_call_addr != after || info->si_arch != AUDIT_ARCH_X86_64;
    wrong += info->si_syscall != regs[REG_RAX] || !sigismember(&now, SIGSYS) || !sigismember(&now, SIGUSR1);
    wrong += sigismember(&((ucontext_t *)context)->uc_sigmask, SIGSYS);
    switch (info->si_syscall) {
    case SYS_getppid: regs[REG_RAX] = 1000 + seen++; break;
    case SYS_readv: regs[REG_RAX] = regs[REG_RDX]; seen++; break;
    case SYS_mremap: regs[REG_RAX] = regs[REG_RSI]; seen++; break;
    case SYS_execve: regs[REG_RAX] = -EXDEV; seen++; break;
    case SYS_mlockall: regs[REG_RAX] = -EILSEQ; seen++; break;
    default: wrong++;
    }
}

static long by_own_instruction(long nr) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(nr) : "rcx", "r11", "memory");
    return result;
}

/* Every kind of call, by which way ever the gate makes it. */
static void *use(void *name) {
    long bad = 0;
    seen = 0;
    for (long i = 0; i < CALLS; i++) {
        bad += getppid() != 1000 + 2 * i;
        bad += by_own_instruction(SYS_getppid) != 1001 + 2 * i;
    }
    static char bytes[8];
    struct iovec parts[2] = {{bytes, 4}, {bytes + 4, 4}};
    for (int i = 0; i < CALLS; i++) bad += readv(0, parts, 2) != 2;
    bad += mremap(bytes, 4096, 1 << 30, MREMAP_MAYMOVE) != (void *)4096;
    char *none[] = {NULL};
    bad += execve("/bin/false", none, none) != -1 || errno != EXDEV;
    bad += mlockall(MCL_CURRENT) != -1 || errno != EILSEQ;
    char line[99];
    int len = snprintf(line, sizeof line, "%s: %ld seen, %ld wrong, %ld bad\n", (char *)name, seen, wrong, bad);
    write(1, line, len);
    return NULL;
}

static void ends(const char *how, pid_t pid) {
    int status;
    waitpid(pid, &status, 0);
    printf("%s: %d %d\n", how, WIFSIGNALED(status) ? WTERMSIG(status) : 0, WEXITSTATUS(status));
    fflush(stdout);
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_refused, .sa_flags = SA_SIGINFO};
    sigaddset(&action.sa_mask, SIGUSR1);
    sigaction(SIGSYS, &action, NULL);
    getppid();
    static const unsigned refused[] = {SYS_getppid, SYS_readv, SYS_mremap, SYS_execve, SYS_mlockall};
    enum { COUNT = sizeof refused / sizeof *refused };
    struct sock_filter code[COUNT + 3] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
    };
    for (int i = 0; i < COUNT; i++)
        code[1 + i] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, refused[i], COUNT - i, 0);
    code[COUNT + 1] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[COUNT + 2] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP | DATA);
    struct sock_fprog filter = {COUNT + 3, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) return 99;
    use("process");
    pthread_t thread;
    pthread_create(&thread, NULL, use, "thread");
    pthread_join(thread, NULL);
    pid_t pid = fork();
    if (pid == 0) {
        use("child");
        _exit(3);
    }
    ends("it", pid);
    /* Blocked, ignored and default: it ends the process. */
    for (int way = 0; way < 3; way++) {
        pid = fork();
        if (pid == 0) {
            sigset_t set;
            sigemptyset(&set);
            sigaddset(&set, SIGSYS);
            if (way == 0) sigprocmask(SIG_BLOCK, &set, NULL);
            if (way == 1) signal(SIGSYS, SIG_IGN);
            if (way == 2) signal(SIGSYS, SIG_DFL);
            getppid();
            _exit(4);
        }
        ends("refused", pid);
    }
    return 0;
}
