// Coroutines on small stacks of malloc'ed memory, interrupted by timers all the time, with handlers
// on the coroutine's stack, on an alternate stack, and on one that is changed and unmapped.
#define _GNU_SOURCE
#include <assert.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

enum { COROUTINES = 8, ROUNDS = 400, STACK = 24 << 10 };
static ucontext_t home, each[COROUTINES];
static volatile int now;
static volatile long ticks, on_alternate;
static char *alternate;

static void tick(int s, siginfo_t *i, void *u) {
    char here;
    ticks++;
    if (alternate && &here >= alternate && &here < alternate + (64 << 10)) on_alternate++;
    assert(s == SIGALRM && i->si_signo == SIGALRM && u);
}

static void run(int self) {
    double sum = 0;
    char local[512];
    memset(local, self, sizeof local);
    for (int i = 0; i < ROUNDS; i++) {
        sum += self * 0.5;
        if (i % 16 == 0) getppid();
        swapcontext(&each[self], &home);
        for (unsigned j = 0; j < sizeof local; j++) assert(local[j] == self);
        assert(sum == (i + 1) * (self * 0.5));
    }
    now = -1;
}

int main(void) {
    struct sigaction act = {.sa_sigaction = tick, .sa_flags = SA_SIGINFO | SA_RESTART};
    for (int turn = 0; turn < 3; turn++) {
        if (turn) act.sa_flags |= SA_ONSTACK;
        sigaction(SIGALRM, &act, 0);
        stack_t st = {.ss_flags = SS_DISABLE}, old;
        if (turn) {
            alternate = mmap(0, 64 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            st = (stack_t){.ss_sp = alternate, .ss_size = 64 << 10};
        }
        assert(!sigaltstack(&st, &old));
        assert(!sigaltstack(0, &old) && (turn ? old.ss_sp == alternate : old.ss_flags == SS_DISABLE));
        struct itimerval it = {{0, 1000}, {0, 1000}};
        setitimer(ITIMER_REAL, &it, 0);
        char *stacks[COROUTINES];
        for (int i = 0; i < COROUTINES; i++) {
            getcontext(&each[i]);
            stacks[i] = malloc(STACK);
            each[i].uc_stack.ss_sp = stacks[i];
            each[i].uc_stack.ss_size = STACK;
            each[i].uc_link = &home;
            makecontext(&each[i], (void (*)(void))run, 1, i);
        }
        for (int i = 0; i < ROUNDS; i++)
            for (now = 0; now < COROUTINES;) {
                int k = now;
                swapcontext(&home, &each[k]);
                now = k + 1;
            }
        while (ticks < (turn + 1) * 20) pause();
        it = (struct itimerval){{0, 0}, {0, 0}};
        setitimer(ITIMER_REAL, &it, 0);
        for (int i = 0; i < COROUTINES; i++) free(stacks[i]);
        if (turn == 1) munmap(alternate, 64 << 10);  // still registered
    }
    printf("ticked %d, on the alternate stack %d\n", ticks >= 60, on_alternate >= 20);
}
