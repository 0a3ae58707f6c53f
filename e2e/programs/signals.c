/* Signals, long jumps and exits of a folded program. */
#include "common.h"
#include <setjmp.h>

static const size_t LEN = 64 * UNIT;
static char *memory;
static volatile sig_atomic_t ticks;
static volatile uint64_t at_random = 1;

static void tick(int signal) {
    (void)signal;
    at_random = mix(at_random);
    size_t page = at_random % (LEN / PAGE);
    check_from(memory + page * PAGE, PAGE, 1, page);
    ticks++;
}

static sigjmp_buf away;
static void jump(int signal) { siglongjmp(away, signal); }

static void alarms(void) {
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    NEED(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval often = {{0, 700}, {0, 700}}, never = {{0, 0}, {0, 0}};
    NEED(setitimer(ITIMER_REAL, &often, NULL) == 0);
    for (int i = 0; i < 3 || ticks <= 100; i++) check(memory, LEN, 1);
    NEED(setitimer(ITIMER_REAL, &never, NULL) == 0);
}

/* A handler on its own stack jumps out of a fault of memfold's, and out of another fault. */
static void jumps(void) {
    stack_t stack = {.ss_sp = malloc(64 << 10), .ss_size = 64 << 10};
    NEED(sigaltstack(&stack, NULL) == 0);
    struct sigaction action = {.sa_handler = jump, .sa_flags = SA_ONSTACK | SA_NODEFER};
    NEED(sigaction(SIGSEGV, &action, NULL) == 0 && sigaction(SIGALRM, &action, NULL) == 0);
    for (volatile int i = 0; i < 200; i++) {
        push_out(memory, 4 * UNIT);
        if (sigsetjmp(away, 1) == 0) {
            struct itimerval soon = {{0, 0}, {0, 1 + i * 13}};
            NEED(setitimer(ITIMER_REAL, &soon, NULL) == 0);
            for (;;) check(memory, LEN, 1);
        }
        if (sigsetjmp(away, 1) == 0) {
            *(volatile int *)8 = 1;
            fail("no SIGSEGV", __FILE__, __LINE__);
        }
        if (i % 10) i += 9;
    }
}

static volatile sig_atomic_t sent, taken, stop;

static void take(int signal) {
    NEED(signal == SIGSYS);
    __atomic_add_fetch(&taken, 1, __ATOMIC_SEQ_CST);
}

static void *send_many(void *unused) {
    for (; !stop; usleep(100)) {
        __atomic_add_fetch(&sent, 1, __ATOMIC_SEQ_CST);
        raise(SIGSYS);
    }
    return unused;
}

static void need_masks(int blocks_sys) {
    sigset_t set;
    NEED(pthread_sigmask(SIG_SETMASK, NULL, &set) == 0);
    for (int signal = 1; signal < 32; signal++)
        NEED(sigismember(&set, signal) == (signal == SIGUSR1 || (signal == SIGSYS && blocks_sys)));
    struct sigaction action;
    NEED(sigaction(SIGSYS, NULL, &action) == 0 && action.sa_handler == take && (action.sa_flags & SA_RESTART));
}

/* A fork keeps the signal masks and SIGSYS in parent and child. No signal to another thread is
 * lost or kills the process. */
static void forks(void) {
    struct sigaction tick_action = {.sa_handler = tick, .sa_flags = SA_RESTART}, action = {.sa_handler = take, .sa_flags = SA_RESTART};
    NEED(sigaction(SIGALRM, &tick_action, NULL) == 0 && sigaction(SIGSYS, &action, NULL) == 0);
    pthread_t sender;
    NEED(!pthread_create(&sender, NULL, send_many, NULL));
    struct itimerval often = {{0, 700}, {0, 700}}, never = {{0, 0}, {0, 0}};
    NEED(setitimer(ITIMER_REAL, &often, NULL) == 0);
    for (int i = 0; i < 40; i++) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        if (i % 2) sigaddset(&set, SIGSYS);
        NEED(pthread_sigmask(SIG_SETMASK, &set, NULL) == 0);
        push_out(memory, 4 * UNIT);
        pid_t pid = fork();
        NEED(pid >= 0);
        need_masks(i % 2);
        if (pid == 0) {
            int before = taken;
            if (i % 2 == 0) NEED(raise(SIGSYS) == 0 && taken == before + 1);
            check(memory, 8 * UNIT, 1);
            _exit(5);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 5);
    }
    NEED(setitimer(ITIMER_REAL, &never, NULL) == 0);
    stop = 1;
    NEED(!pthread_join(sender, NULL));
    NEED(sent == taken && sent > 100 && ticks > 20);
    struct sigaction usual = {.sa_handler = SIG_DFL};
    NEED(sigaction(SIGSYS, &usual, NULL) == 0);
}

int main(int argc, char **argv) {
    NEED(argc >= 2);
    memory = map(LEN);
    fill(memory, LEN, 1);
    push_out(memory, LEN);
    if (is(argv[1], "alarms")) alarms();
    else if (is(argv[1], "jumps")) jumps();
    else if (is(argv[1], "forks")) forks();
    else if (is(argv[1], "exit")) exit(atoi(argv[2]));
    else if (is(argv[1], "crash")) *(volatile int *)8 = 1;
    else if (is(argv[1], "abort")) abort();
    else return 2;
    check(memory, LEN, 1);
    puts("right");
}
