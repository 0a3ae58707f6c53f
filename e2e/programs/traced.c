// A debugger starts its program: a child asks to be traced, uses folded memory, and executes a
// program. Its parent waits for the stop at exec.
#include "common.h"
#include <sys/ptrace.h>

#define BYTES (64 * UNIT)

static long raw(long number) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number) : "rcx", "r11", "memory");
    return result;
}

/* Acts as debuggers do: sets signals to default, makes calls by libc and directly, with strings
 * and memory that may be folded. */
static void child(unsigned char *memory, char *path, char **arguments, int writes) {
    if (ptrace(PTRACE_TRACEME, 0, 0, 0)) _exit(96);
    for (int i = 0; i < 20; i++) raw(SYS_getppid), getppid();
    signal(SIGUSR1, SIG_DFL);
    signal(SIGSEGV, SIG_DFL);
    sigset_t set;
    sigemptyset(&set);
    sigprocmask(SIG_SETMASK, &set, NULL);
    unsigned sum = 0;
    for (size_t at = 0; at < BYTES; at += PAGE) {
        if (memory[at] != (at / PAGE) % 251) _exit(95);
        if (writes) memory[at + 9] = 7;
        sum += memory[at + 9];
    }
    if (writes && sum != BYTES / PAGE * 7) _exit(94);
    execl("/no/such/program", "no", NULL);
    execv(path, arguments);
    _exit(93);
}

static void once(const char *how, unsigned char *memory, char *path, char **arguments) {
    int status, stops = 0;
    pid_t pid = !strcmp(how, "vfork") ? vfork() : fork();
    if (!pid) child(memory, path, arguments, 1);
    while (waitpid(pid, &status, 0) == pid && WIFSTOPPED(status)) {
        if (WSTOPSIG(status) != SIGTRAP) fprintf(stderr, "stopped by signal %d\n", WSTOPSIG(status)), _exit(92);
        stops++;
        ptrace(PTRACE_CONT, pid, 0, 0);
    }
    if (stops != 1 || status) fprintf(stderr, "%d stops, then status %x\n", stops, status), _exit(91);
}

static void on_signal(int signal) { (void)signal; }

int main(int argc, char **argv) {
    unsigned char *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    signal(SIGUSR1, on_signal);
    signal(SIGSEGV, on_signal);
    char *path = strdup(argc > 2 ? argv[2] : "/bin/true"), *arguments[] = {strdup("true"), NULL};
    for (int i = 0; i < 4; i++) {
        for (size_t at = 0; at < BYTES; at += PAGE) {
            memory[at] = (at / PAGE) % 251;
            NEED(memory[at + 9] == (i && !strcmp(argv[1], "vfork") ? 7 : 0));
        }
        once(argv[1], memory, path, arguments);
    }
    for (size_t at = 0; at < BYTES; at += PAGE) NEED(memory[at] == (at / PAGE) % 251);
    puts("right");
    return 0;
}
