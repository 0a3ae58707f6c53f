// Threads: cancellation, signals among them, forks with handlers, robust locks, their ends.
#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int pipes[2];
static _Atomic int cleaned, ready, handled;
static void clean(void *p) { cleaned += (long)p; }
static void *waits(void *p) {
    char c;
    pthread_cleanup_push(clean, (void *)1);
    if (p) pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, 0);
    ready++;
    if (p == (void *)2) for (;;) ;
    while (read(pipes[0], &c, 1) == 1) ;
    pthread_cleanup_pop(0);
    return 0;
}
static void on(int s) { handled++; (void)s; }
static __thread sigjmp_buf back;
static void leaves(int s) { handled++; siglongjmp(back, s); }
static void *jumps(void *p) {
    for (volatile int i = 0; i < 50; i++)
        if (!sigsetjmp(back, 1)) {
            char c;
            ready++;
            read(pipes[0], &c, 1);
            abort();
        }
    return p;
}
static void *forks(void *p) {
    for (int i = 0; i < 20; i++) {
        int status, pid = fork();
        if (!pid) { raise(SIGUSR1); _exit(handled ? 7 : 8); }
        assert(waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 7);
        char *args[] = {"true", 0};
        assert(!posix_spawnp(&pid, "true", 0, 0, args, 0));
        assert(waitpid(pid, &status, 0) == pid && status == 0);
        pid = vfork();
        if (!pid) { getppid(); execlp("false", "false", (char *)0); _exit(99); }
        assert(waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 1);
    }
    return p;
}
static void forker(int s) {
    int e = errno, pid = _Fork();
    if (!pid) _exit(s);
    int status;
    while (waitpid(pid, &status, 0) != pid) ;
    assert(WEXITSTATUS(status) == s);
    handled++;
    errno = e;
}
static pthread_mutex_t *locks;
static void *owner(void *p) {
    for (int i = 0; i < 4; i++) pthread_mutex_lock(&locks[i * 100]);
    return p;
}
static void *nothing(void *p) { return p; }

int main(void) {
    pthread_t t, u[8];
    void *result;
    assert(!pipe(pipes));
    for (long how = 0; how < 3; how++) {
        ready = 0;
        pthread_create(&t, 0, waits, (void *)how);
        while (!ready) sched_yield();
        if (how == 0) usleep(2000);
        pthread_cancel(t);
        pthread_join(t, &result);
        assert(result == PTHREAD_CANCELED);
    }
    printf("cancelled, cleaned %d\n", cleaned);

    struct sigaction a = {.sa_handler = leaves};
    sigaction(SIGUSR2, &a, 0);
    a.sa_handler = on;
    sigaction(SIGUSR1, &a, 0);
    ready = 0;
    pthread_create(&t, 0, jumps, 0);
    for (int i = 1; i <= 50; i++) {
        while (ready < i) sched_yield();
        pthread_kill(t, SIGUSR2);
        while (handled < i) sched_yield();
    }
    pthread_join(t, 0);
    printf("jumped %d times\n", handled);

    for (int i = 0; i < 4; i++) pthread_create(&u[i], 0, forks, 0);
    for (int i = 0; i < 4; i++) pthread_join(u[i], 0);
    puts("forked");

    handled = 0;
    a.sa_handler = forker;
    a.sa_flags = SA_RESTART;
    sigaction(SIGUSR1, &a, 0);
    for (int i = 0; i < 20; i++) raise(SIGUSR1);
    printf("forked in a handler %d times\n", handled);

    locks = mmap(0, 400 * sizeof *locks, 3, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t at;
    pthread_mutexattr_init(&at);
    pthread_mutexattr_setrobust(&at, PTHREAD_MUTEX_ROBUST);
    for (int i = 0; i < 4; i++) {
        pthread_mutexattr_setprotocol(&at, i == 3 ? PTHREAD_PRIO_INHERIT : PTHREAD_PRIO_NONE);
        pthread_mutex_init(&locks[i * 100], &at);
    }
    pthread_create(&t, 0, owner, 0);
    pthread_join(t, 0);
    for (int i = 0; i < 4; i++) printf("owner died %d\n", pthread_mutex_lock(&locks[i * 100]) == EOWNERDEAD);

    for (int i = 0; i < 2000; i++) {
        pthread_create(&t, 0, nothing, (void *)(long)i);
        pthread_join(t, &result);
        assert(result == (void *)(long)i);
    }
    puts("ended");
    fflush(stdout);
    // What is blocked and ignored goes over to the next program, the gate's own too.
    signal(SIGBUS, SIG_IGN);
    signal(SIGUSR1, SIG_IGN);
    sigset_t m;
    sigemptyset(&m);
    sigaddset(&m, SIGSYS), sigaddset(&m, SIGSEGV), sigaddset(&m, SIGUSR2);
    sigprocmask(SIG_SETMASK, &m, 0);
    unsetenv("LD_PRELOAD");
    execlp("grep", "grep", "-E", "Sig(Blk|Ign|Cgt)", "/proc/self/status", (char *)0);
}
