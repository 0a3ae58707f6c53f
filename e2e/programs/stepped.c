/* Calls getppid on a stack whose next page is missing, in rounds. A child traces this process,
 * and in round N sends a signal after N instructions of the call. Each signal is handled once,
 * and none is blocked afterwards. Prints "right". */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 400, WARM = 1000, PAGE = 4096 };

static volatile long handled;

static void handler(int signal)
{
    (void)signal;
    handled++;
}

/* Stops for the tracer, and calls getppid with the stack pointer at `top`. */
static void call_from(char *top)
{
    asm volatile("mov %%rsp, %%rbx\n mov %0, %%rsp\n int3\n call *%1\n mov %%rbx, %%rsp"
                 :
                 : "r"(top), "r"(getppid)
                 : "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9", "r10", "r11", "memory", "cc");
}

static void send_on(pid_t pid, int steps, int signal)
{
    if (ptrace(steps >= 0 ? PTRACE_SINGLESTEP : PTRACE_CONT, pid, 0, signal)) _exit(2);
}

static int trace(pid_t pid, int ready, int go)
{
    char c;
    int status, round = 0, steps = -1;
    siginfo_t info;
    if (read(go, &c, 1) != 1 || ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_EXITKILL) || write(ready, "x", 1) != 1) return 1;
    while (waitpid(pid, &status, 0) == pid && WIFSTOPPED(status)) {
        int signal = WSTOPSIG(status);
        if (signal != SIGTRAP || ptrace(PTRACE_GETSIGINFO, pid, 0, &info)) {
            send_on(pid, steps, signal);
            continue;
        }
        if (info.si_code == SI_KERNEL) steps = ++round;
        if (steps-- == 0) kill(pid, SIGUSR1);
        send_on(pid, steps, 0);
    }
    return 0;
}

int main(int n, char **arg)
{
    size_t size = (n > 1 ? atol(arg[1]) : 64) << 20;
    int ready[2], go[2];
    pid_t self = getpid();
    struct sigaction action = {.sa_handler = handler};
    char *at = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *stack = mmap(0, 64 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED || stack == MAP_FAILED || pipe(ready) || pipe(go) || sigaction(SIGUSR1, &action, 0)) return 1;
    for (size_t i = 0; i < size; i += 8) *(size_t *)(at + i) = i % 64 ? i : i * 0x9e3779b97f4a7c15u;
    for (int i = 0; i < WARM; i++) getppid();
    pid_t child = fork();
    if (child == 0) _exit(trace(self, ready[1], go[0]));
    char c;
    prctl(PR_SET_PTRACER, child);
    if (write(go[1], "x", 1) != 1 || read(ready[0], &c, 1) != 1) return 1;
    for (long round = 1; round <= ROUNDS; round++) {
        sigset_t blocked;
        char *top = stack + 32 * PAGE + 24;
        if (madvise(stack, 64 * PAGE, MADV_DONTNEED)) return 1;
        *(volatile char *)top = 1; /* resident; the page below is missing */
        call_from(top);
        sigprocmask(SIG_BLOCK, 0, &blocked);
        for (int signal = 1; signal < 32; signal++)
            if (sigismember(&blocked, signal)) return printf("%d is blocked after %ld steps\n", signal, round), 1;
        if (handled != round) return printf("%ld of %ld signals\n", handled, round), 1;
    }
    for (size_t i = 0; i < size; i += 8)
        if (*(size_t *)(at + i) != (i % 64 ? i : i * 0x9e3779b97f4a7c15u)) return printf("wrong at %zu\n", i), 1;
    puts("right");
    return 0;
}
