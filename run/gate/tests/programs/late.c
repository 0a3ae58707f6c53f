// Is armed while its threads are in everything that a thread can be in.
#define _GNU_SOURCE
#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static _Atomic int armed, over, started, ticks, faults, right;
static int gated(void) { return madvise(0, 0, 4242) == 4242; }
#define check() (gated() ? (void)right++ : (printf("%s: not gated\n", __func__), fflush(stdout), abort()))
static void started_here(void) { started++; }

static int in[2], out[2], sockets[2], never[2], listener;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int is_changed;
static sem_t sem;

static void *reads(void *p) {
    char c;
    started_here();
    assert(read(in[0], &c, 1) == 1);
    check();
    return p;
}
static void *receives(void *p) {
    char c[8];
    started_here();
    assert(recv(sockets[0], c, 8, 0) == 3);
    check();
    return p;
}
static void *writes(void *p) {
    static char much[1 << 20];
    started_here();
    // What is written in part is told, as after any handler.
    for (size_t done = 0; done < sizeof much;) {
        long n = write(out[1], much + done, sizeof much - done);
        assert(n > 0);
        done += n;
    }
    check();
    return p;
}
static void *waits(void *p) {
    started_here();
    pthread_mutex_lock(&lock);
    while (!is_changed) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
    check();
    return p;
}
static void *locks(void *p) {
    started_here();
    while (sem_wait(&sem)) assert(errno == EINTR);
    check();
    return p;
}
// Once EINTR, as the kernel has it; never anything else.
static void *sleeps(void *p) {
    started_here();
    int interrupted = 0;
    struct timespec left = {3600, 0};
    while (!armed) {
        struct timespec short_ = {0, 2000000};
        interrupted += nanosleep(&short_, &left) && errno == EINTR;
    }
    check();
    return p;
}
static void *polls(void *p) {
    started_here();
    int epoll = epoll_create1(0);
    struct epoll_event event = {EPOLLIN}, got;
    epoll_ctl(epoll, EPOLL_CTL_ADD, never[0], &event);
    while (!armed) {
        struct pollfd fd = {never[0], POLLIN};
        int r = poll(&fd, 1, 3);
        assert(r == 0 || (r == -1 && errno == EINTR));
        r = epoll_wait(epoll, &got, 1, 3);
        assert(r == 0 || (r == -1 && errno == EINTR));
        fd_set set;
        FD_ZERO(&set);
        FD_SET(never[0], &set);
        struct timeval time = {0, 3000};
        r = select(never[0] + 1, &set, 0, 0, &time);
        assert(r == 0 || (r == -1 && errno == EINTR));
    }
    close(epoll);
    check();
    return p;
}
// Everything blocked, from before and for ever.
static void *blocks(void *p) {
    sigset_t all, now;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, 0);
    started_here();
    while (!armed) sched_yield();
    check();
    pthread_sigmask(0, 0, &now);
    for (int s = 1; s < 65; s++)
        if (s != SIGKILL && s != SIGSTOP && s != 32 && s != 33) assert(sigismember(&now, s));
    return p;
}
// In a handler on an alternate stack for most of the time.
static __thread volatile int in_handler;
static void slow(int s) {
    for (volatile int i = 0; i < 30000; i++) ;
    in_handler = s;
}
static void *alternate(void *p) {
    stack_t stack = {.ss_sp = malloc(1 << 16), .ss_size = 1 << 16}, now;
    sigaltstack(&stack, 0);
    started_here();
    while (!armed) {
        pthread_kill(pthread_self(), SIGUSR2);
        for (volatile int i = 0; i < 30000; i++) ;
    }
    assert(!sigaltstack(0, &now) && now.ss_sp == stack.ss_sp && now.ss_size == 1 << 16 && !now.ss_flags);
    pthread_kill(pthread_self(), SIGUSR2);
    assert(in_handler == SIGUSR2);
    check();
    return p;
}
// Registers are as they were.
static void *computes(void *p) {
    started_here();
    while (!over) {
        double a = 1, b = 0;
        unsigned long c = 1;
        for (int i = 0; i < 20000; i++) { a = a * 1.0000001 + b; b += 1e-9; c = c * 6364136223846793005ul + 1; }
        static double first; static unsigned long first_c;
        static pthread_mutex_t m = PTHREAD_MUTEX_INITIALIZER;
        pthread_mutex_lock(&m);
        if (!first) { first = a; first_c = c; }
        assert(a == first && c == first_c);
        pthread_mutex_unlock(&m);
    }
    check();
    return p;
}
static void *short_lived(void *p) {
    if (p) check();
    return p;
}
static void *creates(void *p) {
    started_here();
    while (!over) {
        pthread_t t;
        void *is_armed = armed ? (void *)1 : 0;
        assert(!pthread_create(&t, 0, short_lived, is_armed));
        pthread_join(t, 0);
    }
    check();
    return p;
}
static void *detaches(void *p) {
    started_here();
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, 64 << 10);
    while (!over) {
        pthread_t t;
        while (pthread_create(&t, &attr, short_lived, 0)) assert(errno == EAGAIN || errno == EINTR || 1);
        usleep(100);
    }
    check();
    return p;
}
static void *forks(void *p) {
    extern char **environ;
    started_here();
    while (!over) {
        int status, pid = fork();
        if (!pid) _exit(7);
        while (waitpid(pid, &status, 0) != pid) assert(errno == EINTR);
        assert(WIFEXITED(status) && WEXITSTATUS(status) == 7);
        char *args[] = {"true", 0};
        assert(!posix_spawnp(&pid, "true", 0, 0, args, environ));
        while (waitpid(pid, &status, 0) != pid) assert(errno == EINTR);
        assert(status == 0);
    }
    check();
    return p;
}
static __thread sigjmp_buf back;
static void on_fault(int s, siginfo_t *info, void *c) {
    assert(info->si_addr == (void *)64);
    faults++;
    siglongjmp(back, s);
}
static void *faulty(void *p) {
    started_here();
    while (!over)
        if (!sigsetjmp(back, 1)) *(volatile int *)64;
    check();
    return p;
}
static void tick(int s) { ticks++; }
static void *mmaps(void *p) {
    started_here();
    while (!over) {
        char *at = mmap(0, 1 << 16, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        assert(at != MAP_FAILED);
        at[5] = 1;
        free(malloc(300000));
        assert(!munmap(at, 1 << 16));
    }
    check();
    return p;
}
// Starts with dispatch off, and runs through patched sites.
static _Atomic long passed;
static void *stays_apart(void *p) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, 0);
    while (!over) {
        char c = 'x';
        int fds[2];
        assert(!pipe(fds) && write(fds[1], &c, 1) == 1 && (c = 0, read(fds[0], &c, 1) == 1) && c == 'x');
        close(fds[0]);
        close(fds[1]);
        assert(!gated());
        passed++;
    }
    return p;
}
static pthread_t of_its_own;
static void start_apart(void) { assert(!pthread_create(&of_its_own, 0, stays_apart, 0)); }

int main(int argc, char **argv) {
    void *library = dlopen(argv[1], RTLD_NOW);
    if (!library) return puts(dlerror()), 1;
    int (*arm)(void) = dlsym(library, "memfold_late_arm");
    void (*apart)(void (*)(void)) = dlsym(library, "memfold_late_apart");
    struct sigaction act = {.sa_flags = SA_RESTART};
    act.sa_handler = tick, sigaction(SIGALRM, &act, 0);
    act.sa_handler = slow, act.sa_flags = SA_ONSTACK | SA_RESTART, sigaction(SIGUSR2, &act, 0);
    act.sa_sigaction = on_fault, act.sa_flags = SA_SIGINFO | SA_NODEFER, sigaction(SIGSEGV, &act, 0);
    assert(!pipe(in) && !pipe(out) && !pipe(never) && !socketpair(AF_UNIX, SOCK_STREAM, 0, sockets));
    sem_init(&sem, 0, 0);
    void *(*all[])(void *) = {reads, receives, writes, waits, locks, sleeps, polls, blocks, alternate, computes,
                              computes, creates, creates, detaches, forks, faulty, mmaps};
    enum { N = sizeof all / sizeof *all };
    pthread_t threads[N];
    for (int i = 0; i < N; i++) assert(!pthread_create(&threads[i], 0, all[i], 0));
    while (started < N) sched_yield();
    struct itimerval time = {{0, 1000}, {0, 1000}};
    if (argc > 2) setitimer(ITIMER_REAL, &time, 0);
    assert(!gated());
    if (arm()) return 1;
    assert(gated());
    armed = 1;
    apart(start_apart);
    char c = 'a';
    assert(write(in[1], &c, 1) == 1 && send(sockets[1], "abc", 3, 0) == 3);
    static char sink[1 << 20];
    for (size_t got = 0; got < sizeof sink;) { long n = read(out[0], sink, sizeof sink); assert(n > 0); got += n; }
    pthread_mutex_lock(&lock), is_changed = 1, pthread_cond_broadcast(&changed), pthread_mutex_unlock(&lock);
    sem_post(&sem);
    // What comes of it later: as many turns of the apart thread as patch its sites.
    int before = faults, ticked = ticks;
    while (faults < before + 100 || passed < 100 || (argc > 2 && ticks < ticked + 50)) sched_yield();
    over = 1;
    for (int i = 0; i < N; i++) assert(!pthread_join(threads[i], 0));
    pthread_join(of_its_own, 0);
    assert(right >= N);
    // libc's own use of the signal.
    assert(!setuid(getuid()));
    puts("all passed");
    return 0;
}
