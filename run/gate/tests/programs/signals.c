// What a program can see of its signals: masks, actions, information, contexts.
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

static sigjmp_buf back;
static volatile int got, code, blocked_inside;
static void *volatile where;

static void note(int s, siginfo_t *i, void *u) {
    sigset_t m;
    got = s, code = i->si_code, where = i->si_addr;
    sigprocmask(SIG_BLOCK, 0, &m);
    blocked_inside = sigismember(&m, s);
    (void)u;
}
static void jump(int s, siginfo_t *i, void *u) { note(s, i, u); siglongjmp(back, s); }
static void step_over(int s, siginfo_t *i, void *u) {
    note(s, i, u);
    ((ucontext_t *)u)->uc_mcontext.gregs[REG_RIP] = ((ucontext_t *)u)->uc_mcontext.gregs[REG_RBX];
}
static void set(int s, void *h, int flags) {
    struct sigaction a = {.sa_sigaction = h, .sa_flags = SA_SIGINFO | flags};
    assert(!sigaction(s, &a, 0));
}
static sigset_t only(int s) { sigset_t m; sigemptyset(&m); if (s) sigaddset(&m, s); return m; }
static void say(const char *what) {
    printf("%s: signal %d code %d blocked inside %d\n", what, got, code, blocked_inside);
    got = code = blocked_inside = 0;
}

static int ends_by(void (*f)(void)) {
    fflush(stdout);
    int status, pid = fork();
    if (!pid) { f(); _exit(77); }
    assert(waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 1000 + WEXITSTATUS(status);
}
static void segv(void) { *(volatile char *)8 = 1; }
static void bus(void) { raise(SIGBUS); }
static void sys(void) { raise(SIGSYS); }
static void blocked_segv(void) {
    sigset_t m; sigfillset(&m); sigprocmask(SIG_BLOCK, &m, 0); signal(SIGSEGV, SIG_IGN); segv();
}
static void ignored_bus(void) { signal(SIGBUS, SIG_IGN); raise(SIGBUS); _exit(3); }
static void no_room(void) {
    // A handler's frame that can't be written.
    set(SIGUSR1, note, 0);
    __asm__ volatile("mov %0,%%rsp\n mov %1,%%edi\n mov $10,%%esi\n mov $62,%%eax\n syscall\n hlt"
                     : : "r"(64L), "r"(getpid()) : "rdi", "rsi", "rax", "memory");
}
static void masks(void) {
    int fd[2];
    assert(!pipe(fd));
    sigset_t all, none = only(0), old;
    sigfillset(&all);
    for (int how = 0; how < 4; how++) {
        sigprocmask(SIG_SETMASK, &all, &old);
        set(SIGUSR1, note, 0);
        raise(SIGUSR1);
        sigset_t pending;
        sigpending(&pending);
        assert(sigismember(&pending, SIGUSR1) && !got);
        struct timespec t = {5, 0};
        struct pollfd p = {fd[0], POLLIN, 0};
        fd_set f;
        FD_ZERO(&f);
        FD_SET(fd[0], &f);
        struct epoll_event ev;
        int e = epoll_create1(0), r;
        if (how == 0) r = sigsuspend(&none);
        if (how == 1) r = ppoll(&p, 1, &t, &none);
        if (how == 2) r = pselect(fd[0] + 1, &f, 0, 0, &t, &none);
        if (how == 3) r = epoll_pwait(e, &ev, 1, 5000, &none);
        assert(r == -1 && errno == EINTR);
        close(e);
        sigset_t now;
        sigprocmask(SIG_SETMASK, &old, &now);
        for (int s = 1; s < 32; s++)
            assert(sigismember(&now, s) == (s != SIGKILL && s != SIGSTOP));
        say("with another mask");
    }
    sigset_t one = only(SIGUSR2);
    sigprocmask(SIG_BLOCK, &one, 0);
    raise(SIGUSR2);
    int s = signalfd(-1, &one, 0);
    struct signalfd_siginfo si;
    assert(read(s, &si, sizeof si) == sizeof si);
    printf("signalfd %d\n", si.ssi_signo);
    raise(SIGUSR2);
    siginfo_t info;
    struct timespec t = {5, 0};
    printf("sigtimedwait %d\n", sigtimedwait(&one, &info, &t));
    sigprocmask(SIG_UNBLOCK, &one, 0);
}

// Masks and actions, thousands of times, while signals come that the gate puts off.
static volatile int ticks;
static void tick(int s) {
    sigset_t m = only(SIGUSR2);
    sigprocmask(SIG_BLOCK, &m, 0);
    ticks++, (void)s;
}
static void other(int s) { (void)s; }
static void often_changed(void) {
    sigset_t both = only(SIGUSR1), now, old;
    sigaddset(&both, SIGBUS);
    signal(SIGALRM, tick);
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &often, 0);
    for (int i = 0; i < 3000 || ticks < 100; i++) {
        int s = i % 2 ? SIGUSR1 : SIGBUS;
        struct sigaction a;
        signal(s, other);
        set(s, note, 0);
        assert(!sigaction(s, 0, &a) && a.sa_sigaction == note);
        assert(!sigprocmask(SIG_BLOCK, &both, &old));
        assert(!sigismember(&old, SIGUSR1) && !sigismember(&old, SIGBUS) && !sigismember(&old, SIGUSR2));
        kill(getpid(), s);
        assert(!got && !sigprocmask(SIG_BLOCK, 0, &now));
        assert(sigismember(&now, SIGUSR1) && sigismember(&now, SIGBUS) && !sigismember(&now, SIGUSR2));
        if (i % 3 == 0) assert(!sigprocmask(SIG_SETMASK, &old, 0));
        else assert(!sigprocmask(SIG_UNBLOCK, &both, &now) && sigismember(&now, s));
        assert(got == s && blocked_inside);
        assert(syscall(SYS_rt_sigprocmask, 7, &both, 0, 8) == -1 && errno == EINVAL);
        assert(syscall(SYS_rt_sigprocmask, SIG_BLOCK, (void *)16, 0, 8) == -1 && errno == EFAULT);
        assert(syscall(SYS_rt_sigprocmask, SIG_BLOCK, 0, (void *)16, 8) == -1 && errno == EFAULT);
        got = blocked_inside = 0;
    }
    setitimer(ITIMER_REAL, &never, 0);
    signal(SIGALRM, SIG_IGN), signal(SIGUSR1, SIG_DFL), signal(SIGBUS, SIG_DFL);
    assert(!sigprocmask(SIG_BLOCK, 0, &now));
    for (int s = 1; s < 32; s++) assert(!sigismember(&now, s));
}

int main(void) {
    set(SIGSEGV, jump, 0);
    if (!sigsetjmp(back, 1)) *(volatile char *)16 = 1;
    printf("at %p ", where), say("jumped out of SIGSEGV");
    set(SIGSEGV, step_over, SA_NODEFER | SA_RESETHAND);
    __asm__ volatile("lea 1f(%%rip),%%rbx\n movb $0,24\n 1:" : : : "rbx", "memory");
    printf("at %p ", where), say("stepped over SIGSEGV");
    struct sigaction a;
    sigaction(SIGSEGV, 0, &a);
    assert(a.sa_handler == SIG_DFL);
    char name[] = "/tmp/memfold-gate-XXXXXX";
    int fd = mkstemp(name);
    unlink(name);
    char *hole = mmap(0, 4096, PROT_READ, MAP_SHARED, fd, 0);
    set(SIGBUS, jump, SA_NODEFER);
    if (!sigsetjmp(back, 1)) (void)*(volatile char *)hole;
    printf("at its place %d ", where == hole), say("jumped out of SIGBUS");
    set(SIGSYS, note, 0);
    raise(SIGSYS), say("SIGSYS raised");
    // Read by the kernel: an error, not a signal.
    assert(write(fd, (void *)16, 4) == -1 && errno == EFAULT);
    assert(syscall(SYS_rt_sigprocmask, SIG_BLOCK, (void *)16, 0, 8) == -1 && errno == EFAULT);
    assert(syscall(SYS_rt_sigaction, SIGUSR1, (void *)16, 0, 8) == -1 && errno == EFAULT);
    // The program's own dispatch isn't the gate's.
    assert(!prctl(59, 0, 0, 0, 0));
    // Blocked ones of the gate's come when they are unblocked.
    sigset_t m = only(SIGBUS), pend;
    set(SIGBUS, note, 0);
    sigprocmask(SIG_BLOCK, &m, 0);
    raise(SIGBUS);
    sigpending(&pend);
    assert(!got && sigismember(&pend, SIGBUS));
    sigprocmask(SIG_UNBLOCK, &m, 0), say("SIGBUS unblocked");
    for (int s = 1; s < 32; s++) {
        if (s == SIGKILL || s == SIGSTOP) continue;
        struct sigaction b = {.sa_sigaction = note, .sa_flags = SA_SIGINFO | SA_ONSTACK};
        sigaddset(&b.sa_mask, SIGBUS), sigaddset(&b.sa_mask, s);
        assert(!sigaction(s, &b, 0) && !sigaction(s, 0, &a));
        assert(a.sa_sigaction == note && sigismember(&a.sa_mask, SIGBUS) && a.sa_flags & SA_ONSTACK);
        kill(getpid(), s);
        assert(got == s && blocked_inside);
    }
    say("the last of all");
    for (int s = 1; s < 32; s++) signal(s, SIG_DFL);
    masks();
    often_changed();
    printf("ends by %d %d %d %d %d %d\n", ends_by(segv), ends_by(bus), ends_by(sys), ends_by(blocked_segv),
           ends_by(ignored_bus), ends_by(no_room));
    set(SIGSEGV, note, 0);
    printf("ends by %d\n", ends_by(no_room));
}
