/* SIGBUS, SIGSEGV and SIGSYS sent by a process arrive as without memfold, which uses these
 * signals itself. */
#include "common.h"
#include <poll.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>

static const int SIGNALS[] = {SIGBUS, SIGSEGV, SIGSYS};
static volatile sig_atomic_t got, code, from;
static void note(int signal, siginfo_t *info, void *context) {
    (void)context;
    got = signal, code = info->si_code, from = info->si_pid;
}

static sigset_t only(int signal) {
    sigset_t set;
    sigemptyset(&set);
    if (signal) sigaddset(&set, signal);
    return set;
}
static void block(int signal) {
    sigset_t set = only(signal);
    NEED(!pthread_sigmask(SIG_SETMASK, &set, NULL));
}
static void handle(int signal, int flags) {
    struct sigaction action = {.sa_sigaction = note, .sa_flags = SA_SIGINFO | flags};
    NEED(!sigaction(signal, &action, NULL));
    got = 0;
}

static void each(void (*test)(int)) {
    char *p = map(64 * UNIT);
    fill(p, 64 * UNIT, 1);
    for (size_t i = 0; i < 3; i++) {
        push_out(p, 64 * UNIT);
        block(0);
        test(SIGNALS[i]);
    }
    check(p, 64 * UNIT, 1);
}

/* The program takes the signal by a call. It was sent before or during the call, to the process
 * or to the thread. */
static int waited;
static void *send_later(void *arg) {
    int signal = (int)(long)arg;
    while (!__atomic_load_n(&waited, __ATOMIC_SEQ_CST)) sched_yield();
    for (int i = 0; i < 100; i++) sched_yield();
    NEED(!kill(getpid(), signal));
    return NULL;
}
static void start_later(pthread_t *thread, int signal) {
    waited = 0;
    NEED(!pthread_create(thread, NULL, send_later, (void *)(long)signal));
}

static void waits(int signal) {
    block(signal);
    sigset_t set = only(signal), pending;
    siginfo_t info;
    struct timespec soon = {0, 1000}, long_enough = {60, 0};
    int taken;
    NEED(sigtimedwait(&set, &info, &soon) == -1 && errno == EAGAIN);
    NEED(!kill(getpid(), signal) && !sigpending(&pending) && sigismember(&pending, signal));
    NEED(!sigwait(&set, &taken) && taken == signal);
    NEED(!sigpending(&pending) && !sigismember(&pending, signal));
    NEED(!raise(signal) && sigtimedwait(&set, &info, &long_enough) == signal);
    NEED(info.si_code == SI_USER && info.si_pid == getpid());
    NEED(!sigqueue(getpid(), signal, (union sigval){.sival_int = 77}));
    NEED(sigwaitinfo(&set, &info) == signal && info.si_code == SI_QUEUE && info.si_int == 77);
    pthread_t thread;
    start_later(&thread, signal);
    waited = 1;
    NEED(sigwaitinfo(&set, &info) == signal && info.si_code == SI_USER && info.si_pid == getpid());
    NEED(!pthread_join(thread, NULL));
    NEED(sigtimedwait(&set, &info, &soon) == -1 && errno == EAGAIN);
}
static void sigwaits(void) { each(waits); }

static void suspends(int signal) {
    handle(signal, 0);
    block(signal);
    sigset_t none = only(0);
    NEED(!kill(getpid(), signal) && !got);
    NEED(sigsuspend(&none) == -1 && errno == EINTR && got == signal && code == SI_USER && from == getpid());
    got = 0;
    NEED(!raise(signal) && !got);
    NEED(ppoll(NULL, 0, NULL, &none) == -1 && errno == EINTR && got == signal);
    got = 0;
    pthread_t thread;
    start_later(&thread, signal);
    waited = 1;
    NEED(sigsuspend(&none) == -1 && errno == EINTR && got == signal);
    NEED(!pthread_join(thread, NULL));
    /* A ready descriptor takes precedence over a pending signal. */
    int ends[2];
    NEED(!pipe(ends) && write(ends[1], "x", 1) == 1);
    struct pollfd ready = {.fd = ends[0], .events = POLLIN};
    got = 0;
    NEED(!raise(signal) && ppoll(&ready, 1, NULL, &none) == 1 && !got);
    block(0);
    NEED(got == signal);
}
static void sigsuspends(void) { each(suspends); }

/* Ways to read a descriptor: into one buffer, into several, and by preadv2, which uses the
 * file's own position for an offset of -1. */
static ssize_t by_read(int fd, struct signalfd_siginfo *info) { return read(fd, info, sizeof *info); }
static ssize_t by_vector(int fd, struct signalfd_siginfo *info, int by_preadv2) {
    char *at = (char *)info;
    struct iovec parts[] = {{at, 2}, {at + 2, 0}, {at + 2, 8}, {at + 10, sizeof *info - 10}}, whole = {info, sizeof *info};
    ssize_t n = by_preadv2 ? preadv2(fd, parts, 4, -1, 0) : readv(fd, parts, 4);
    /* Before Linux 6.10 each buffer must have room for a whole record. */
    if (n == -1 && errno == EINVAL) n = by_preadv2 ? preadv2(fd, &whole, 1, -1, 0) : readv(fd, &whole, 1);
    return n;
}
static ssize_t by_readv(int fd, struct signalfd_siginfo *info) { return by_vector(fd, info, 0); }
static ssize_t by_preadv2(int fd, struct signalfd_siginfo *info) { return by_vector(fd, info, 1); }

/* Data that only looks like a record of a signalfd is unchanged. It has the code of memfold's
 * internal signal. */
static void reads_what_looks_so(int signal) {
    struct signalfd_siginfo written = {.ssi_signo = (uint32_t)signal, .ssi_code = -(1 << 20)}, info;
    sigset_t set = only(signal);
    int ends[2], fd = signalfd(-1, &set, 0);
    NEED(fd >= 0 && !pipe(ends) && write(ends[1], &written, sizeof written) == sizeof written);
    NEED(read(ends[0], &info, sizeof info) == sizeof info && !memcmp(&info, &written, sizeof info));
    close(ends[0]), close(ends[1]), close(fd);
}

static void reads_by(int signal, ssize_t (*get)(int, struct signalfd_siginfo *)) {
    block(signal);
    sigset_t set = only(signal);
    int fd = signalfd(-1, &set, SFD_NONBLOCK), epoll = epoll_create1(0);
    struct signalfd_siginfo info;
    struct epoll_event event = {.events = EPOLLIN};
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    NEED(fd >= 0 && !epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event));
    NEED(get(fd, &info) == -1 && errno == EAGAIN && poll(&ready, 1, 0) == 0);
    NEED(!kill(getpid(), signal));
    NEED(poll(&ready, 1, 60000) == 1 && epoll_wait(epoll, &event, 1, 60000) == 1);
    NEED(get(fd, &info) == sizeof info && (int)info.ssi_signo == signal && (int)info.ssi_pid == getpid());
    NEED(info.ssi_code == SI_USER);
    NEED(get(fd, &info) == -1 && errno == EAGAIN);
    NEED(!fcntl(fd, F_SETFL, 0));
    pthread_t thread;
    start_later(&thread, signal);
    waited = 1;
    NEED(get(fd, &info) == sizeof info && (int)info.ssi_signo == signal && info.ssi_code == SI_USER);
    NEED(!pthread_join(thread, NULL) && poll(&ready, 1, 0) == 0);
    start_later(&thread, signal);
    waited = 1;
    NEED(poll(&ready, 1, -1) == 1 && get(fd, &info) == sizeof info);
    NEED(!pthread_join(thread, NULL) && poll(&ready, 1, 0) == 0);
    close(fd), close(epoll);
}
static void reads(int signal) {
    reads_by(signal, by_read);
    reads_by(signal, by_readv);
    reads_by(signal, by_preadv2);
    reads_what_looks_so(signal);
}
static void signalfds(void) { each(reads); }

/* A thread that doesn't block the signal gets it. If that is the caller, it arrives before the
 * call returns. */

static void *open_to_all(void *arg) {
    block(0);
    __atomic_store_n(&waited, 1, __ATOMIC_SEQ_CST);
    while (!got) (void)!poll(NULL, 0, 1);
    if (arg) {
        for (int i = 0; i < 100; i++) {
            got = 0;
            NEED(!kill(getpid(), (int)(long)arg) && got == (int)(long)arg);
        }
    }
    return NULL;
}
static void others(int signal) {
    handle(signal, 0);
    block(signal);
    waited = 0;
    pthread_t thread;
    NEED(!pthread_create(&thread, NULL, open_to_all, (void *)(long)signal));
    while (!__atomic_load_n(&waited, __ATOMIC_SEQ_CST)) sched_yield();
    NEED(!kill(getpid(), signal));
    NEED(!pthread_join(thread, NULL));
    NEED(code == SI_USER && from == getpid());
    /* Sent by another process. The kernel may choose a thread of the engine, which sends it on. */
    for (int n = 0; n < 30; n++) {
        got = 0;
        NEED(!pthread_create(&thread, NULL, open_to_all, NULL));
        pid_t parent = getpid(), child = fork();
        if (!child) _exit(kill(parent, signal));
        NEED(WEXITSTATUS(wait_for(child)) == 0 && !pthread_join(thread, NULL));
        NEED(got == signal && code == SI_USER && from == child);
    }
    block(0);
    for (int i = 0; i < 1000; i++) {
        got = 0;
        NEED(!kill(getpid(), signal) && got == signal);
    }
}
static void threads(void) { each(others); }

/* A blocked signal ends no call, stays pending over exec, and is dropped when it is set to be
 * ignored. */
static void stays(int signal) {
    handle(signal, 0);
    block(signal);
    int ends[2];
    char byte;
    NEED(!pipe(ends));
    pid_t main_thread = getpid(), child = fork();
    if (!child) {
        for (int i = 0; i < 20; i++) NEED(!kill(main_thread, signal)), usleep(1000);
        _exit(write(ends[1], "x", 1) != 1);
    }
    NEED(read(ends[0], &byte, 1) == 1 && byte == 'x' && !got);
    NEED(WEXITSTATUS(wait_for(child)) == 0);
    struct sigaction ignore = {.sa_handler = SIG_IGN};
    NEED(!sigaction(signal, &ignore, NULL));
    handle(signal, 0);
    block(0);
    NEED(!got);
    block(signal);
    child = fork();
    if (!child) {
        NEED(!raise(signal));
        char text[200];
        snprintf(text, sizeof text, "import signal; exit(%d not in signal.sigpending())", signal);
        execlp("python3", "python3", "-c", text, NULL);
    }
    NEED(wait_for(child) == 0);
}
static void stay(void) { each(stays); }

/* A program is executed by a name at the end of a mapping, or beside folded memory, while the signal
 * of a fault is blocked or ignored. */
static char *folded;
static void executes(int signal) {
    const size_t large = 2ul << 20;
    char *gap = map(2 * PAGE);
    NEED(munmap(gap + PAGE, PAGE) == 0);
    char *ends[] = {gap + PAGE, (char *)(((uintptr_t)folded + 16 * UNIT) & -large)};
    for (int n = 0; n < 4; n++) {
        char *name = ends[n / 2] - sizeof "/bin/true";
        pid_t child = fork();
        if (!child) {
            struct sigaction ignore = {.sa_handler = SIG_IGN};
            if (n % 2) NEED(!sigaction(signal, &ignore, NULL));
            else block(signal);
            strcpy(name, "/bin/true");
            execl(name, "true", NULL);
        }
        NEED(wait_for(child) == 0);
    }
}
static void executed(void) {
    folded = map_folded(32 * UNIT, 3);
    each(executes);
    check(folded, 32 * UNIT, 3);
}

/* A thread sends itself a signal whose data claims to come from the kernel: a fault, a refused
 * call, a trapped call. */
static void *fault_address;
static void note_fault(int signal, siginfo_t *info, void *context) {
    note(signal, info, context);
    fault_address = info->si_addr;
}
static long to_thread(int signal, siginfo_t *info) { return syscall(SYS_rt_tgsigqueueinfo, getpid(), gettid(), signal, info); }
static long to_process(int signal, siginfo_t *info) { return syscall(SYS_rt_sigqueueinfo, getpid(), signal, info); }
static long by_descriptor(int signal, siginfo_t *info) {
    int fd = syscall(SYS_pidfd_open, getpid(), 0), sent = syscall(SYS_pidfd_send_signal, fd, signal, info, 0);
    close(fd);
    return sent;
}
static void makes_up(int signal, int as, char *p, long (*send)(int, siginfo_t *)) {
    siginfo_t info = {.si_signo = signal, .si_code = as}, taken = {0};
    info.si_addr = p + 3 * UNIT;
    struct sigaction action = {.sa_sigaction = note_fault, .sa_flags = SA_SIGINFO};
    NEED(!sigaction(signal, &action, NULL));
    got = 0;
    NEED(!send(signal, &info) && got == signal && code == as && fault_address == info.si_addr);
    block(signal);
    sigset_t set = only(signal), pending;
    struct timespec none = {0, 0};
    got = 0;
    NEED(!send(signal, &info) && !got && !sigpending(&pending) && sigismember(&pending, signal));
    NEED(sigtimedwait(&set, &taken, &none) == signal && taken.si_code == as && taken.si_addr == info.si_addr);
    int fd = signalfd(-1, &set, SFD_NONBLOCK);
    struct signalfd_siginfo read_info;
    NEED(!send(signal, &info) && read(fd, &read_info, sizeof read_info) == sizeof read_info);
    NEED(read_info.ssi_signo == (unsigned)signal && read_info.ssi_code == as && !close(fd));
    NEED(!send(signal, &info) && !got);
    block(0);
    NEED(got == signal && code == as && fault_address == info.si_addr);
}
static void *takes_none(void *over) {
    while (!*(volatile int *)over) sched_yield();
    return NULL;
}
/* A signal sent to a thread that blocks it is not delivered to another thread. */
static void made_up_for_one(int signal) {
    siginfo_t info = {.si_signo = signal, .si_code = 1};
    pthread_t thread;
    int over = 0;
    sigset_t set = only(signal), pending;
    NEED(!pthread_create(&thread, NULL, takes_none, &over));
    block(signal);
    got = 0;
    NEED(!to_thread(signal, &info) && !sigpending(&pending) && sigismember(&pending, signal));
    over = 1;
    NEED(!pthread_join(thread, NULL) && !got && sigtimedwait(&set, &info, &(struct timespec){0, 0}) == signal);
    block(0);
}
static void made_up(void) {
    char *p = map_folded(64 * UNIT, 3);
    static const int signals[] = {SIGSEGV, SIGBUS, SIGSYS, SIGFPE, SIGILL, SIGTRAP}, codes[] = {1, 2, 5, 6, 0x80, 5000};
    for (int i = 0; i < 36; i++) {
        makes_up(signals[i / 6], codes[i % 6], p, to_thread);
        makes_up(signals[i / 6], codes[i % 6], p, to_process);
        makes_up(signals[i / 6], codes[i % 6], p, by_descriptor);
    }
    for (int i = 0; i < 6; i++) made_up_for_one(signals[i]);
    /* The kernel allows such data only from the process itself. */
    siginfo_t info = {.si_signo = SIGSEGV, .si_code = SEGV_MAPERR};
    pid_t child = fork();
    if (!child) pause();
    NEED(syscall(SYS_rt_sigqueueinfo, child, SIGSEGV, &info) == -1 && errno == EPERM);
    NEED(!kill(child, SIGKILL) && WIFSIGNALED(wait_for(child)));
    /* A process without a handler is ended, as by a fault. */
    child = fork();
    if (!child) {
        signal(SIGBUS, SIG_DFL);
        info.si_signo = SIGBUS, info.si_code = BUS_ADRERR;
        to_thread(SIGBUS, &info);
        _exit(3);
    }
    NEED((wait_for(child) & 0x7f) == SIGBUS);
    check(p, 64 * UNIT, 3);
}

/* SECCOMP_MODE_STRICT: the program continues, and ends normally. */
static void strict_with(int last) {
    char *p = map_folded(64 * UNIT, 3);
    pid_t child = fork();
    if (!child) {
        int zero = open("/dev/zero", O_RDONLY);
        NEED(!prctl(PR_SET_SECCOMP, 1));
        for (int i = 0; i < 20; i++)
            if (read(zero, p + i * UNIT, PAGE) != PAGE) syscall(SYS_exit, 5);
        for (size_t i = 0; i < 64 * UNIT; i += PAGE) ((volatile char *)p)[i]++;
        syscall(last, 7);
    }
    int status = wait_for(child);
    NEED(last == SYS_exit ? WIFEXITED(status) && WEXITSTATUS(status) == 7 : WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    check(p, 64 * UNIT, 3);
}
static void strict(void) {
    strict_with(SYS_exit);
    strict_with(SYS_exit_group);
}

int main(int argc, char **argv) {
    alarm(200);
    static const struct test all[] = {
        {"sigwaits", sigwaits}, {"sigsuspends", sigsuspends}, {"signalfds", signalfds},
        {"threads", threads},   {"stay", stay},               {"executed", executed}, {"strict", strict},   {"made_up", made_up},
    };
    return RUN_NAMED(argc, argv, all);
}
