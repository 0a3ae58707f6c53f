/* Signals of every kind on folded memory: their delivery, their stacks, and the state after
 * them. */
#include "common.h"
#include <setjmp.h>
#include <sys/epoll.h>
#include <ucontext.h>

static const size_t LEN = 48 * UNIT;
static char *memory;

static void folded(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    push_out(memory, LEN);
}

/* Pushes out a buffer that is used next. The engine may keep pages that it takes to be in use. */
static char *buffers;
static size_t pushed_out;
static void fold(char *at, size_t len) {
    for (int i = 0; i < 10 && present(at, len) > 0; i++) fill(filler, 48 * UNIT, i);
    pushed_out += len / PAGE - present(at, len);
}

/* KILL and STOP can't be handled; 32 and 33 are libc's. */
static int is_usable(int signal) { return signal != SIGKILL && signal != SIGSTOP && signal != 32 && signal != 33; }

static volatile long came[65], wrong;

static void on_any(int signal, siginfo_t *info, void *context) {
    char local[600];
    memset(local, signal, sizeof local);
    if (info->si_signo != signal || local[(unsigned)came[signal] % sizeof local] != (char)signal) wrong++;
    if (info->si_code == SI_TKILL && info->si_pid != getpid()) wrong++;
    came[signal]++;
}

static void handle_all(void) {
    for (int signal = 1; signal <= 64; signal++) {
        int flags = SA_SIGINFO | SA_RESTART | (signal & 1 ? SA_NODEFER : 0);
        struct sigaction action = {.sa_sigaction = on_any, .sa_flags = flags};
        if (signal & 2) sigfillset(&action.sa_mask);
        if (is_usable(signal)) NEED(sigaction(signal, &action, NULL) == 0);
    }
}

static pid_t target;
static volatile int over;

/* Sends all signals, at most one a millisecond, and each after the last has arrived. If many
 * were pending, their frames would share one stack, which is small. */
static void *send_all(void *none) {
    sigset_t all;
    sigfillset(&all);
    NEED(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0);
    for (int signal = 1; !over; signal = signal % 64 + 1) {
        if (!is_usable(signal)) continue;
        long before = came[signal];
        /* The kernel merges a sent signal with memfold's own signal of the same number, if both
         * arrive at once. */
        int is_shared = signal == SIGBUS || signal == SIGSYS;
        for (int tries = 0; !over && came[signal] == before; tries++) {
            if (tries == 0 || is_shared) NEED(syscall(SYS_tgkill, getpid(), target, signal) == 0);
            usleep(1000);
        }
    }
    return NULL;
}

enum { COROUTINES = 150, STACK = 64 << 10, WANTED = 8 };
static ucontext_t home, each[COROUTINES];

static int enough(void) {
    for (int signal = 1; signal <= 64; signal++)
        if (is_usable(signal) && came[signal] < WANTED) return 0;
    return 1;
}

static void coroutine(int self) {
    char local[20000];
    double sum = 0;
    memset(local, self, sizeof local);
    for (int i = 0;; i++) {
        sum += self * 0.5;
        if (i % 4 == 0) getppid();
        swapcontext(&each[self], &home);
        for (unsigned j = 0; j < sizeof local; j += 64) NEED(local[j] == (char)self);
        NEED(sum == (i + 1) * (self * 0.5));
    }
}

/* Every signal, from timers and from a thread, on folded stacks in malloc'ed memory. */
static void coroutines(void) {
    folded();
    char *stacks = malloc(COROUTINES * (size_t)STACK);
    NEED(stacks);
    for (int i = 0; i < COROUTINES; i++) {
        getcontext(&each[i]);
        each[i].uc_stack.ss_sp = stacks + i * (size_t)STACK;
        each[i].uc_stack.ss_size = STACK;
        each[i].uc_link = &home;
        makecontext(&each[i], (void (*)(void))coroutine, 1, i);
    }
    handle_all();
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 5};
    struct itimerspec often = {{0, 1000000}, {0, 1000000}};
    struct itimerval alarms = {{0, 1000}, {0, 1000}};
    timer_t timer;
    NEED(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 && timer_settime(timer, 0, &often, NULL) == 0);
    NEED(setitimer(ITIMER_REAL, &alarms, NULL) == 0 && setitimer(ITIMER_PROF, &alarms, NULL) == 0);
    pthread_t sender;
    target = gettid();
    NEED(!pthread_create(&sender, NULL, send_all, NULL));
    for (int round = 0; !enough(); round++) {
        for (int i = 0; i < COROUTINES; i++) swapcontext(&home, &each[i]);
        check_from(memory + round % 3 * 16 * UNIT, 16 * UNIT, 1, round % 3 * 16 * UNIT / PAGE);
    }
    over = 1;
    NEED(!pthread_join(sender, NULL) && wrong == 0);
    check(memory, LEN, 1);
}

static char *volatile stood_at;
static void stand(int signal) {
    char local[3000];
    memset(local, signal, sizeof local);
    stood_at = local;
    check_from(memory + signal * PAGE, PAGE, 1, signal);
}

static void stand_on(char *stack, size_t len) {
    stack_t now, set = {.ss_sp = stack, .ss_size = len};
    NEED(sigaltstack(&set, NULL) == 0 && sigaltstack(NULL, &now) == 0);
    NEED(now.ss_sp == stack && now.ss_size == len && now.ss_flags == 0);
    stood_at = NULL;
    raise(SIGUSR1);
    NEED(stood_at > stack && stood_at < stack + len);
}

/* Alternate stacks in folded memory: set, changed, removed, unmapped. */
static void stacks(void) {
    folded();
    struct sigaction action = {.sa_handler = stand, .sa_flags = SA_ONSTACK};
    NEED(sigaction(SIGUSR1, &action, NULL) == 0);
    const size_t len = 128 << 10;
    stack_t none = {.ss_flags = SS_DISABLE};
    for (int round = 0; round < 8; round++) {
        char *mapped = map(UNIT), *own = malloc(UNIT);
        NEED(own);
        char *heap = (char *)(((uintptr_t)own + PAGE - 1) & -PAGE);
        memset(own, 7, UNIT);
        fill(mapped, UNIT, round);
        fold(mapped, UNIT);
        stand_on(mapped + len, len);
        stand_on(heap + len, len);
        fill(filler, 48 * UNIT, round);
        raise(SIGUSR1);
        NEED(stood_at > heap + len && stood_at < heap + 2 * len);
        NEED(munmap(mapped + len, len) == 0);
        check_from(mapped, len, round, 0);
        check_from(mapped + 2 * len, UNIT - 2 * len, round, 2 * len / PAGE);
        NEED(sigaltstack(&none, NULL) == 0);
        stood_at = NULL;
        raise(SIGUSR1);
        NEED(stood_at && !(stood_at > heap && stood_at < heap + UNIT));
        for (size_t i = 2 * len + PAGE; i < UNIT - PAGE; i++) NEED(heap[i] == 7);
        free(own);
        NEED(munmap(mapped, UNIT) == 0);
    }
    NEED(pushed_out > 0);
    check(memory, LEN, 1);
}

/* A pending stop signal is dropped when SIGCONT arrives. */
static int is_kept(int signal) { return is_usable(signal) && signal != SIGCONT; }

/* Pages are folded and loaded while all signals are blocked. Sent signals arrive when they are
 * unblocked. */
static void blocked(void) {
    folded();
    handle_all();
    sigset_t all, before, pending;
    sigfillset(&all);
    for (int round = 0; round < 3; round++) {
        long then[65];
        memcpy(then, (void *)came, sizeof then);
        NEED(sigprocmask(SIG_SETMASK, &all, &before) == 0);
        for (int signal = 1; signal <= 64; signal++)
            if (is_kept(signal)) NEED(syscall(SYS_tgkill, getpid(), gettid(), signal) == 0);
        check(memory, LEN, 1);
        push_out(memory, LEN);
        check(memory, LEN, 1);
        NEED(sigpending(&pending) == 0);
        for (int signal = 1; signal <= 64; signal++)
            if (is_kept(signal)) NEED(sigismember(&pending, signal) && came[signal] == then[signal]);
        NEED(sigprocmask(SIG_SETMASK, &before, NULL) == 0);
        for (int signal = 1; signal <= 64; signal++)
            if (is_kept(signal)) NEED(came[signal] == then[signal] + 1);
    }
    NEED(wrong == 0);
}

/* More turns than there are hold slots. */
enum { KINDS = 3, TURNS = 100, BUFFER = 64 << 10 };
static int empty[2], sockets[2], poller;

/* Waits with a folded buffer for an event that never comes. */
static void wait_in(int kind, char *at) {
    struct iovec *part = (struct iovec *)at;
    struct msghdr *message = (struct msghdr *)(at + PAGE);
    switch (kind) {
    case 0: (void)!read(empty[0], at, BUFFER); break;
    case 1:
        *part = (struct iovec){at + 2 * PAGE, BUFFER - 2 * PAGE};
        *message = (struct msghdr){.msg_iov = part, .msg_iovlen = 1};
        recvmsg(sockets[0], message, 0);
        break;
    default: epoll_wait(poller, (struct epoll_event *)at, BUFFER / sizeof(struct epoll_event), -1);
    }
    fail("it came", __FILE__, __LINE__);
}

static void prepare(void) {
    folded();
    struct epoll_event event = {.events = EPOLLIN};
    NEED(pipe(empty) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0 && (poller = epoll_create1(0)) >= 0);
    NEED(epoll_ctl(poller, EPOLL_CTL_ADD, empty[0], &event) == 0);
    buffers = map(KINDS * BUFFER);
}

/* The buffers of calls that never returned are no longer held. */
static void nothing_is_held(void) {
    check(memory, LEN, 1);
    push_out(memory, LEN);
    check(memory, LEN, 1);
    NEED(pushed_out > 0);
}

static sigjmp_buf out;
static void jump(int signal) { siglongjmp(out, 1); }

static void leave(void) {
    prepare();
    struct sigaction action = {.sa_handler = jump, .sa_flags = SA_RESTART};
    NEED(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval once = {{0, 0}, {0, 1000}};
    for (volatile int turn = 0; turn < TURNS; turn++)
        for (volatile int kind = 0; kind < KINDS; kind++) {
            char *at = buffers + kind * BUFFER;
            fill(at, BUFFER, turn);
            if (turn % 20 == 0) fold(at, BUFFER);
            if (sigsetjmp(out, 1) == 0) {
                NEED(setitimer(ITIMER_REAL, &once, NULL) == 0);
                wait_in(kind, at);
            }
            check_from(at + 2 * PAGE, BUFFER - 2 * PAGE, turn, 2);
        }
    nothing_is_held();
}

static volatile int cleaned, waiting;
static void clean(void *at) {
    check_from((char *)at + 2 * PAGE, PAGE, 5, 2);
    cleaned++;
}

static void *wait_to_be_cancelled(void *how) {
    int kind = (intptr_t)how / 2, type = (intptr_t)how & 1 ? PTHREAD_CANCEL_ASYNCHRONOUS : PTHREAD_CANCEL_DEFERRED;
    char *at = buffers + kind * BUFFER;
    pthread_cleanup_push(clean, at);
    NEED(!pthread_setcanceltype(type, NULL));
    waiting = 1;
    wait_in(kind, at);
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancel(void) {
    prepare();
    for (int turn = 0; turn < TURNS / 2; turn++)
        for (intptr_t how = 0; how < 2 * KINDS; how++) {
            char *at = buffers + how / 2 * BUFFER;
            pthread_t thread;
            void *result;
            fill(at, BUFFER, 5);
            if (turn % 20 == 0) fold(at, BUFFER);
            waiting = 0;
            NEED(!pthread_create(&thread, NULL, wait_to_be_cancelled, (void *)how));
            while (!waiting) sched_yield();
            if (turn % 2) usleep(1000);
            NEED(!pthread_cancel(thread) && !pthread_join(thread, &result) && result == PTHREAD_CANCELED);
        }
    NEED(cleaned == TURNS * KINDS);
    nothing_is_held();
}

static char *hole, *closed;
static volatile long holes, opened, missed;
static int file;

static void on_fault(int signal, siginfo_t *info, void *context) {
    char *at = info->si_addr;
    if (signal == SIGBUS && info->si_code == BUS_ADRERR && at == hole + PAGE + 5) {
        NEED(ftruncate(file, 2 * PAGE) == 0);
        holes++;
    } else if (signal == SIGSEGV && info->si_code == SEGV_ACCERR && at == closed + 9) {
        NEED(mprotect(closed, PAGE, PROT_READ | PROT_WRITE) == 0);
        opened++;
    } else if (signal == SIGSEGV && info->si_code == SEGV_MAPERR && at == (char *)24) {
        missed++;
        siglongjmp(out, 1);
    } else {
        char text[256];
        greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
        int n = snprintf(text, sizeof text, "WRONG: signal %d code %d at %p, not %p, %p: error %llx at %llx, %ld %ld %ld\n", signal,
                         info->si_code, at, hole + PAGE + 5, closed + 9, regs[REG_ERR], regs[REG_RIP], holes, opened, missed);
        (void)!write(2, text, n);
        _exit(98);
    }
}

/* The program handles the signals by which memfold serves faults. */
static void faults(void) {
    folded();
    char name[] = "/tmp/memfold-hole-XXXXXX";
    NEED((file = mkstemp(name)) >= 0 && unlink(name) == 0 && ftruncate(file, 2 * PAGE) == 0);
    hole = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    NEED(hole != MAP_FAILED);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGBUS, &action, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0);
    enum { FAULTS = 300 };
    for (volatile int i = 0; i < FAULTS; i++) {
        size_t page = mix(i) % (LEN / PAGE);
        closed = memory + page * PAGE;
        if (i % 2) check_from(closed, PAGE, 1, page);
        NEED(mprotect(closed, PAGE, i % 3 ? PROT_READ : PROT_NONE) == 0);
        volatile char *byte = closed + 9;
        *byte = *byte;
        check_from(closed, PAGE, 1, page);
        NEED(ftruncate(file, PAGE) == 0);
        ((volatile char *)hole)[PAGE + 5] = 1;
        if (sigsetjmp(out, 1) == 0) *(volatile char *)24 = 1;
    }
    NEED(holes == FAULTS && opened == FAULTS && missed == FAULTS);
    check(memory, LEN, 1);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"coroutines", coroutines}, {"stacks", stacks}, {"blocked", blocked},
        {"leave", leave},           {"cancel", cancel}, {"faults", faults},
    };
    return RUN_NAMED(argc, argv, all);
}
