/* A program limits itself in the kernel: filters on its threads' calls, no access to the
 * processor's counter, no more threads. It finds every byte right, and ends as without memfold. */
#include "common.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>

#define LEN (48 * UNIT)
static char *memory;

#define ALLOW BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
#define NUMBER BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))
#define IF(nr, skip) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, skip)

static void set(struct sock_filter *code, int len, int by_prctl) {
    struct sock_fprog filter = {len, code};
    NEED(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    NEED(!(by_prctl ? prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) : syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter)));
}

static void deny(unsigned nr, unsigned action) {
    struct sock_filter code[] = {NUMBER, IF(nr, 1), BPF_STMT(BPF_RET | BPF_K, action), ALLOW};
    set(code, 4, nr % 2);
}

/* Allows only the calls that the thread itself needs. */
static void deny_all_but(const int *nr, int count, unsigned action) {
    struct sock_filter code[64] = {NUMBER};
    int len = 1;
    for (int i = 0; i < count; i++) {
        code[len++] = (struct sock_filter)IF(nr[i], 1);
        code[len++] = (struct sock_filter)ALLOW;
    }
    code[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action);
    set(code, len, 1);
}

/* Runs `what` in a child, and returns its exit status. */
static int in_child(void (*what)(void)) {
    fflush(NULL);
    pid_t child = fork();
    NEED(child >= 0);
    if (!child) {
        alarm(60);
        what();
        _exit(33);
    }
    return wait_for(child) & ~0x80;
}

static volatile pid_t asking;
static void *asks(void *arg) {
    asking = gettid();
    syscall(SYS_getppid);
    return arg;
}
static void *ends_later(void *arg) {
    usleep(100000);
    syscall(SYS_exit, 5);
    return arg;
}
static pthread_t first;
static void *asks_last(void *arg) {
    NEED(!pthread_join(first, NULL));
    return asks(arg);
}

static void kill_only(void) {
    push_out(memory, LEN);
    deny(SYS_getppid, SECCOMP_RET_KILL_THREAD);
    asks(NULL);
}
/* A thread is killed where there is no /proc. */
static void kill_apart(void) {
    push_out(memory, LEN);
    if (!chroot("/sys/kernel")) NEED(!chdir("/"));
    deny(SYS_getppid, SECCOMP_RET_KILL_THREAD);
    asks(NULL);
}
static void kill_other(void) {
    pthread_t thread;
    deny(SYS_getppid, SECCOMP_RET_KILL_THREAD);
    NEED(!pthread_create(&thread, NULL, asks, NULL));
    while (!asking || !syscall(SYS_tgkill, getpid(), asking, 0)) sched_yield();
    syscall(SYS_exit, 4);
}
static void kill_last(void) {
    pthread_t thread;
    first = pthread_self();
    deny(SYS_getppid, SECCOMP_RET_KILL_THREAD);
    NEED(!pthread_create(&thread, NULL, asks_last, NULL));
    syscall(SYS_exit, 4);
}
static void kill_first(void) {
    pthread_t thread;
    deny(SYS_getppid, SECCOMP_RET_KILL_THREAD);
    NEED(!pthread_create(&thread, NULL, ends_later, NULL));
    asks(NULL);
}

/* A filter kills threads. As in the kernel, the process ends when the last thread is gone. */
static void killed(void) {
    memory = map_folded(LEN, 1);
    NEED(in_child(kill_only) == SIGSYS);
    NEED(in_child(kill_apart) == SIGSYS);
    NEED(in_child(kill_last) == SIGSYS);
    NEED(in_child(kill_first) == 5 << 8);
    NEED(in_child(kill_other) == 4 << 8);
    check(memory, LEN, 1);
}

static unsigned action;
static volatile int trapped;
static void on_trap(int signal) { trapped += signal == SIGSYS; }

static void goes_on(void) {
    struct sigaction trap = {.sa_handler = on_trap};
    NEED(!sigaction(SIGSYS, &trap, NULL));
    static const int some[] = {SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_rt_sigreturn};
    deny_all_but(some, action == SECCOMP_RET_TRAP ? 5 : 4, action);
    check(memory, LEN, 1);
    fill(memory, LEN, 2);
    check(memory, LEN, 2);
    if (action == SECCOMP_RET_TRAP) syscall(SYS_getppid), NEED(trapped);
    syscall(SYS_exit, 7);
}
static void goes_on_folded(void) {
    push_out(memory, LEN);
    goes_on();
}

static void *shuts_itself_in(void *arg) {
    static const int some[] = {SYS_read, SYS_write, SYS_exit, SYS_exit_group, SYS_rt_sigreturn, SYS_madvise, SYS_futex};
    deny_all_but(some, 7, SECCOMP_RET_ERRNO | EPERM);
    check(memory, LEN, 1);
    return arg;
}
static void beside_another(void) {
    push_out(memory, LEN);
    pthread_t thread;
    NEED(!pthread_create(&thread, NULL, shuts_itself_in, NULL));
    check(memory, LEN, 1);
    NEED(!pthread_join(thread, NULL));
    fill(memory, LEN, 2);
    check(memory, LEN, 2);
    _exit(7);
}

/* A child of vfork. Its parent is folded again after the child has ended. */
static void of_vfork(void) {
    static const int some[] = {SYS_exit_group};
    pid_t child = vfork();
    if (!child) {
        deny_all_but(some, 1, SECCOMP_RET_KILL_PROCESS);
        memory[LEN - 1]++;
        syscall(SYS_exit_group, 7);
    }
    NEED(wait_for(child) == 7 << 8);
    memory[LEN - 1]--;
    push_out(memory, LEN);
    check(memory, LEN, 1);
    _exit(7);
}

/* The kernel refuses a filter, so it must have no effect. */
static void is_not_one(void) {
    push_out(memory, LEN);
    struct sock_filter code = BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0);
    struct sock_fprog filter = {1, &code};
    NEED(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == -1);
    check(memory, LEN, 1);
    _exit(7);
}

/* A filter that refuses nearly all calls does not prevent reads of folded memory. */
static void refused(void) {
    memory = map_folded(LEN, 1);
    static const unsigned all[] = {SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_TRAP, SECCOMP_RET_KILL_THREAD, SECCOMP_RET_KILL_PROCESS};
    for (int i = 0; i < 4; i++) {
        action = all[i];
        NEED(in_child(i % 2 ? goes_on : goes_on_folded) == 7 << 8);
    }
    NEED(in_child(beside_another) == 7 << 8);
    NEED(in_child(of_vfork) == 7 << 8);
    NEED(in_child(is_not_one) == 7 << 8);
    check(memory, LEN, 1);
}

/* The processor's time-stamp counter, which the vDSO reads to tell the time. */
static void counter(void) {
    memory = map_folded(LEN, 1);
    NEED(!prctl(PR_SET_TSC, PR_TSC_SIGSEGV));
    char *other = map(LEN);
    for (int round = 0; round < 3; round++) {
        check(memory, LEN, 1);
        fill(other, LEN, 2 + round);
        check(other, LEN, 2 + round);
    }
    pid_t child = fork();
    NEED(child >= 0);
    if (!child) {
        check(memory, LEN, 1);
        fill(memory, LEN, 2);
        check(other, LEN, 4);
        _exit(7);
    }
    NEED(wait_for(child) == 7 << 8);
    check(memory, LEN, 1);
}

static void unshares(int flags) {
    check(memory, LEN, 1);
    NEED(!unshare(flags) || errno == EPERM || errno == ENOSPC);
    for (int i = 0; i < 2; i++) {
        pid_t child = fork();
        if (child < 0) break;
        if (!child) {
            check(memory, LEN, 1);
            _exit(7);
        }
        NEED(wait_for(child) == 7 << 8);
    }
    push_out(memory, LEN);
    check(memory, LEN, 1);
    /* The process can start no threads now, and neither can memfold. */
    NEED(unshare(CLONE_THREAD | 1) == -1 && errno == EINVAL);
    int again = unshare(CLONE_NEWUSER);
    NEED(!again || errno == EINVAL || errno == EPERM || errno == ENOSPC);
    check(memory, LEN, 1);
    _exit(7);
}
static void of_processes(void) { unshares(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID); }
static void of_time(void) { unshares(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWTIME); }
static void of_children(void) { unshares(CLONE_NEWPID); }

/* Namespaces for children, after which a process can start no thread. */
static void spaces(void) {
    memory = map_folded(LEN, 1);
    NEED(in_child(of_processes) == 7 << 8);
    NEED(in_child(of_time) == 7 << 8);
    NEED(in_child(of_children) == 7 << 8);
    check(memory, LEN, 1);
}

int main(int argc, char **argv) {
    static const struct test all[] = {{"killed", killed}, {"refused", refused}, {"counter", counter}, {"spaces", spaces}};
    return RUN_NAMED(argc, argv, all);
}
