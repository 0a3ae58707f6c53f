/* Syscall User Dispatch by the program itself
 * (Documentation/admin-guide/syscall-user-dispatch.rst), as in Wine. The output is the same with
 * memfold and without. */
#include "common.h"
#include <sys/prctl.h>
#include <ucontext.h>

#define SET_DISPATCH 59
#define OFF 0
#define ON 1
#define INCLUSIVE 2
enum { ALLOW, BLOCK };

/* call(number, first, second, third): an instruction followed by a label, outside and inside the
 * range. Also a restorer inside the range. */
long outside(long number, long a, long b, long c);
long inside(long number, long a, long b, long c);
extern char outside_start[], outside_after[], outside_end[], inside_start[], inside_after[], inside_end[];
extern char restorer[];
#define CALL_CODE(name) \
    ".globl " name "_start, " name ", " name "_after, " name "_end\n" \
    name "_start:\n" name ":\n mov %rdi,%rax\n mov %rsi,%rdi\n mov %rdx,%rsi\n mov %rcx,%rdx\n xor %r10d,%r10d\n xor %r8d,%r8d\n syscall\n" \
    name "_after:\n ret\n"
__asm__(".text\n" CALL_CODE("outside") "outside_end:\n nop\n" CALL_CODE("inside")
        ".globl restorer\nrestorer:\n mov $15,%eax\n syscall\n ud2\ninside_end:\n nop\n");

static volatile char selector;
static volatile int count;
static volatile siginfo_t seen;
static volatile long seen_rax, seen_rip, seen_blocked, answer = 4242;

static long set_dispatch(long mode, void *start, long len, volatile char *at) {
    long made = syscall(SYS_prctl, SET_DISPATCH, mode, start, len, at);
    return made < 0 ? -errno : made;
}

/* Makes no system call. If there is a selector, sets it to allow the handler's return. */
static void take(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    seen = *info, seen_rax = regs[REG_RAX], seen_rip = regs[REG_RIP];
    seen_blocked = sigismember(&((ucontext_t *)context)->uc_sigmask, SIGSYS);
    count++;
    regs[REG_RAX] = answer;
    selector = ALLOW;
}

struct kernel_action {
    void (*handler)(int, siginfo_t *, void *);
    unsigned long flags;
    void *restorer;
    unsigned long mask;
};

static void handle_signal(int signal, void (*handler)(int, siginfo_t *, void *), unsigned long flags) {
    struct kernel_action action = {handler, flags | SA_SIGINFO | 0x04000000 /* SA_RESTORER */, restorer, 0};
    NEED(syscall(SYS_rt_sigaction, signal, &action, NULL, 8) == 0);
}
static void handle(void (*handler)(int, siginfo_t *, void *), unsigned long flags) { handle_signal(SIGSYS, handler, flags); }

static void tell(const char *what, long made, const char *after) {
    printf("%s: made %ld count %d selector %d", what, made, count, selector);
    if (seen.si_signo)
        printf(" signal %d code %d errno %d call %d arch %x address %ld rax %ld rip %ld blocked %ld", seen.si_signo, seen.si_code,
               seen.si_errno, seen.si_syscall, seen.si_arch, (long)((char *)seen.si_call_addr - after), seen_rax,
               (long)((char *)seen_rip - after), seen_blocked);
    puts("");
    memset((void *)&seen, 0, sizeof seen);
    count = seen_rax = seen_rip = seen_blocked = 0;
}

static void info(void) {
    handle(take, 0);
    NEED(set_dispatch(ON, NULL, 0, &selector) == 0);
    selector = BLOCK;
    tell("blocked", outside(SYS_getppid, 1, 2, 3), outside_after);
    NEED(outside(SYS_getpid, 0, 0, 0) == getpid());
    tell("allowed", 0, outside_after);
    selector = BLOCK;
    tell("no call of Linux", outside(0x1234, 1, 2, 3), outside_after);
    selector = BLOCK;
    tell("call that has none to return to", outside(SYS_rt_sigreturn, 1, 2, 3), outside_after);
    selector = BLOCK;
    tell("signals", outside(SYS_rt_sigprocmask, 0, 0, 0), outside_after);
    selector = BLOCK;
    tell("a child", outside(SYS_fork, 0, 0, 0), outside_after);
    selector = BLOCK;
    tell("an end", outside(SYS_exit_group, 1, 0, 0), outside_after);
    NEED(set_dispatch(OFF, NULL, 0, NULL) == 0);
    selector = BLOCK;
    NEED(outside(SYS_getpid, 0, 0, 0) == getpid());
    tell("off", 0, outside_after);
}

/* Frequent calls of libc, and one call site of libc that is used often. */
static void libc_sites(void) {
    handle(take, 0);
    NEED(set_dispatch(ON, NULL, 0, &selector) == 0);
    for (int round = 0; round < 3; round++) {
        pid_t parent = getppid();
        for (int i = 0; i < 100; i++) NEED(getppid() == parent);
        tell("allowed", 0, outside_after);
        selector = BLOCK;
        long made = getppid();
        /* Not computed from the function's address, because the linker may insert a stub. */
        const char *after = (const char *)seen.si_call_addr;
        NEED(after[-2] == 0x0f || after[-2] == (char)0xeb);
        tell("blocked", made, after);
    }
}

static void ranges(void) {
    handle(take, 0);
    /* Range borders around the address after the instruction. */
    for (int n = -1; n <= 1; n++) {
        char *start = inside_after + n;
        NEED(set_dispatch(ON, start, inside_end - start, &selector) == 0);
        selector = BLOCK;
        long made = inside(SYS_getppid, 0, 0, 0);
        selector = ALLOW;
        tell("from", made == getppid(), inside_after);
        NEED(set_dispatch(OFF, NULL, 0, NULL) == 0);
        NEED(set_dispatch(ON, inside_start, inside_after + n - inside_start, &selector) == 0);
        selector = BLOCK;
        made = inside(SYS_getppid, 0, 0, 0);
        selector = ALLOW;
        tell("to", made == getppid(), inside_after);
    }
    /* Without a selector, calls outside the range always trap, and the handler must return
     * inside the range. */
    NEED(set_dispatch(ON, inside_start, inside_end - inside_start, NULL) == 0);
    selector = BLOCK;
    long parent = inside(SYS_getppid, 0, 0, 0), made = outside(SYS_getppid, 0, 0, 0);
    long off = inside(SYS_prctl, SET_DISPATCH, OFF, 0);
    tell("no selector", made, outside_after);
    printf("%d %ld\n", parent == getppid(), off);
}

static void inclusive(void) {
    handle(take, 0);
    long made = set_dispatch(INCLUSIVE, outside_start, outside_end - outside_start, &selector);
    printf("inclusive: %ld\n", made);
    if (made) return;
    selector = BLOCK;
    made = outside(SYS_getppid, 0, 0, 0);
    tell("inside", made, outside_after);
    selector = BLOCK;
    NEED(inside(SYS_getpid, 0, 0, 0) == getpid());
    tell("outside", 0, outside_after);
}

static void arguments(void) {
    char *page = map(PAGE), *kernel = (char *)(1ul << 63), *top = (char *)0x7ffffffff000;
    struct { long mode; char *start; long len; volatile char *at; } all[] = {
        {OFF, NULL, 0, NULL}, {OFF, page, 0, NULL}, {OFF, NULL, 1, NULL}, {OFF, NULL, 0, &selector}, {ON, NULL, 0, &selector},
        {ON, page, 0, &selector}, {ON, page, 1, &selector}, {ON, page, -1, &selector}, {ON, NULL, -1, &selector}, {ON, page, 1, kernel},
        {ON, page, 1, top}, {ON, page, 1, top - 1}, {ON, page, -1, kernel}, {ON, page, 1, (char *)-1}, {INCLUSIVE, NULL, 0, &selector},
        {INCLUSIVE, page, 0, &selector}, {INCLUSIVE, page, 1, &selector}, {INCLUSIVE, page, -1, &selector}, {INCLUSIVE, page, 1, kernel},
        {3, NULL, 0, NULL}, {-1, NULL, 0, NULL}, {1l << 32 | ON, NULL, 0, &selector},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        pid_t pid = fork();
        if (pid == 0) _exit(-inside(SYS_gettid, 0, 0, 0) < 0 ? -set_dispatch(all[i].mode, all[i].start, all[i].len, all[i].at) & 255 : 0);
        /* A process whose selector can't be read is killed by its exit call. */
        int status = wait_for(pid);
        printf("%zu: exits with %d, signal %d\n", i, WEXITSTATUS(status), WTERMSIG(status));
    }
    /* The kernel reads only the lower half of the command's number. */
    NEED(syscall(SYS_prctl, 1l << 32 | SET_DISPATCH, ON, 0, 0, &selector) == 0);
    /* A refused command leaves the previous state. */
    handle(take, 0);
    NEED(set_dispatch(ON, page, -1, &selector) == -EINVAL && set_dispatch(ON, page, 1, kernel) == -EFAULT);
    selector = BLOCK;
    tell("as before", outside(SYS_getppid, 0, 0, 0), outside_after);
}

static void end_of(const char *what, void (*run)(void)) {
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        run();
        _exit(7);
    }
    int status = wait_for(pid);
    printf("%s: signal %d, exits with %d\n", what, WTERMSIG(status), WEXITSTATUS(status));
}
static void dispatch_by(volatile char *at) {
    NEED(set_dispatch(ON, NULL, 0, at) == 0);
    selector = BLOCK;
    outside(SYS_getppid, 0, 0, 0);
}
static void other_value(void) {
    handle(take, 0);
    NEED(set_dispatch(ON, NULL, 0, &selector) == 0);
    selector = 2;
    outside(SYS_getppid, 0, 0, 0);
}
static void no_selector_there(void) {
    handle(take, 0);
    signal(SIGSEGV, SIG_IGN);
    char *page = map(PAGE);
    NEED(mprotect(page, PAGE, PROT_NONE) == 0);
    dispatch_by(page);
}
static void no_handler(void) { dispatch_by(&selector); }
static void ignored(void) { signal(SIGSYS, SIG_IGN), dispatch_by(&selector); }
static void masked(void) {
    handle(take, 0);
    sigset_t set;
    sigemptyset(&set), sigaddset(&set, SIGSYS), sigprocmask(SIG_BLOCK, &set, NULL);
    dispatch_by(&selector);
}
static void block_again(int signal, siginfo_t *info, void *context) { selector = BLOCK; }
static void end_of_handler(void) { handle(block_again, 0), dispatch_by(&selector); }
static void dies_in_libc(void) {
    NEED(set_dispatch(ON, NULL, 0, &selector) == 0);
    for (int i = 0; i < 100; i++) getppid();
    selector = 3;
    getppid();
}
static void once(void) { handle(take, (unsigned)SA_RESETHAND), dispatch_by(&selector), dispatch_by(&selector); }
static void ends(void) {
    end_of("another value", other_value);
    end_of("another value at a site of libc", dies_in_libc);
    end_of("no selector there", no_selector_there);
    end_of("no handler", no_handler);
    end_of("ignored", ignored);
    end_of("masked", masked);
    end_of("the handler's end", end_of_handler);
    end_of("one call", once);
}

/* A call from within the handler traps again, one level deeper. */
static volatile int depth;
static void deeper(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    selector = BLOCK;
    regs[REG_RAX] = ++depth < 5 ? outside(SYS_getppid, 0, 0, 0) + 1 : 100;
    selector = ALLOW;
}
/* The handler changes the selector. Its return is trapped again, so the restorer lies inside the
 * range. */
static void toggling(int signal, siginfo_t *info, void *context) {
    selector = ALLOW;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = getpid() == (pid_t)outside(SYS_getpid, 0, 0, 0) ? info->si_syscall + ++count : -1;
    selector = BLOCK;
}
static void toggled(void) {
    handle(deeper, SA_NODEFER);
    NEED(set_dispatch(ON, inside_start, inside_end - inside_start, &selector) == 0);
    selector = BLOCK;
    long made = outside(SYS_getppid, 0, 0, 0);
    selector = ALLOW;
    printf("deeper: %ld %d\n", made, depth);
    handle(toggling, 0);
    selector = BLOCK;
    long sum = 0;
    for (int i = 0; i < 1000; i++) sum += outside(1000, 0, 0, 0) + (getppid() == SYS_getppid + count);
    selector = ALLOW;
    printf("toggled: %ld %d\n", sum, count);
}

static __thread volatile char own_selector;
static __thread volatile long own_count;
static void of_thread(int signal, siginfo_t *info, void *context) {
    own_selector = ALLOW;
    own_count++;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = syscall(SYS_gettid) + info->si_syscall;
    own_selector = BLOCK;
}
static void *thread(void *number) {
    /* A child has none of its parent's dispatch state. */
    long id = outside(SYS_gettid, 0, 0, 0);
    NEED(id == syscall(SYS_gettid));
    if (number == NULL) return (void *)own_count;
    NEED(set_dispatch(ON, inside_start, inside_end - inside_start, &own_selector) == 0);
    for (long i = 0; i < 100 * (long)number; i++) {
        own_selector = BLOCK;
        NEED(outside(5000 + i, 0, 0, 0) == id + 5000 + i);
        own_selector = ALLOW;
        NEED(outside(SYS_gettid, 0, 0, 0) == id);
    }
    NEED(set_dispatch(OFF, NULL, 0, NULL) == 0);
    own_selector = BLOCK;
    NEED(outside(SYS_gettid, 0, 0, 0) == id);
    return (void *)own_count;
}
static void threads(void) {
    handle(of_thread, 0);
    NEED(set_dispatch(ON, inside_start, inside_end - inside_start, &own_selector) == 0);
    pthread_t all[5];
    for (long n = 0; n < 5; n++) NEED(pthread_create(&all[n], NULL, thread, (void *)n) == 0);
    for (int n = 0; n < 5; n++) {
        void *made;
        NEED(pthread_join(all[n], &made) == 0);
        printf("thread %d: %ld\n", n, (long)made);
    }
    own_selector = BLOCK;
    long id = outside(5000, 0, 0, 0);
    own_selector = ALLOW;
    printf("first: %ld %ld\n", id - 5000 - getpid(), own_count);
}

static void call_blocked(void) {
    selector = BLOCK;
    long made = outside(SYS_getpid, 0, 0, 0);
    selector = ALLOW;
    if (made != getpid()) _exit(8);
}
static char *itself;
static void execute(void) { execl(itself, itself, "executed", NULL); }
static void inherited(void) {
    handle(take, 0);
    NEED(set_dispatch(ON, NULL, 0, &selector) == 0);
    end_of("child", call_blocked);
    fflush(stdout);
    end_of("other program", execute);
    fflush(stdout);
    pid_t pid = vfork();
    if (pid == 0) {
        selector = BLOCK;
        long made = outside(SYS_getpid, 0, 0, 0);
        selector = ALLOW;
        _exit(made == answer);
    }
    printf("child of vfork: %d\n", WEXITSTATUS(wait_for(pid)));
    spawn_and_system();
    selector = BLOCK;
    tell("parent", outside(SYS_getppid, 0, 0, 0), outside_after);
}

/* Signals arrive at any time, and their handlers make calls too. */
static volatile int alarms;
static void on_alarm(int signal, siginfo_t *info, void *context) {
    char before = selector;
    selector = ALLOW;
    NEED(outside(SYS_getpid, 0, 0, 0) == getpid());
    alarms++;
    selector = before;
}
static void beside_signals(void) {
    handle(toggling, 0);
    handle_signal(SIGALRM, on_alarm, SA_RESTART);
    NEED(set_dispatch(ON, inside_start, inside_end - inside_start, &selector) == 0);
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    NEED(setitimer(ITIMER_REAL, &often, NULL) == 0);
    int calls = 0, before;
    while (alarms < 300) {
        selector = BLOCK, before = count;
        long made = outside(2000, 0, 0, 0);
        selector = ALLOW;
        NEED(made == 2000 + count && count == before + 1);
        calls++;
    }
    NEED(setitimer(ITIMER_REAL, &never, NULL) == 0);
    printf("beside signals: %d\n", calls == count);
}

/* The handler and the code inside the range make calls on folded buffers. The selector is folded
 * too. */
static const size_t LEN = 40 * UNIT;
static char *large, *selector_at;
static int file;
static void serve(int signal, siginfo_t *info, void *context) {
    greg_t *regs = ((ucontext_t *)context)->uc_mcontext.gregs;
    *selector_at = ALLOW;
    if (info->si_syscall == 7000) regs[REG_RAX] = pwrite(file, large, LEN, 0);
    if (info->si_syscall == 7001) regs[REG_RAX] = pread(file, large, LEN, 0);
    count++;
    *selector_at = BLOCK;
}
static void folded(void) {
    file = memfd_create("large", 0);
    NEED(file >= 0);
    handle(serve, 0);
    selector_at = map_folded(2 * UNIT, 3);
    *selector_at = ALLOW;
    NEED(set_dispatch(ON, inside_start, inside_end - inside_start, selector_at) == 0);
    large = map_folded(LEN, 1);
    NEED(outside(SYS_getpid, 0, 0, 0) == getpid());
    *selector_at = BLOCK;
    long wrote = outside(7000, 0, 0, 0);
    *selector_at = ALLOW;
    NEED(wrote == (long)LEN && count == 1);
    fill(large, LEN, 2);
    push_out(large, LEN);
    *selector_at = BLOCK;
    long made = outside(7001, 0, 0, 0);
    *selector_at = ALLOW;
    NEED(made == (long)LEN && count == 2);
    push_out(large, LEN);
    check(large, LEN, 1);
    int pipes[2];
    NEED(pipe(pipes) == 0);
    push_out(large, LEN);
    /* Calls inside the range, and at call sites of libc while the selector allows them. */
    for (size_t at = 0; at < LEN; at += APART) {
        *selector_at = BLOCK;
        long in = inside(SYS_write, pipes[1], (long)(large + at), PAGE);
        *selector_at = ALLOW;
        NEED(in == (long)PAGE && read(pipes[0], large + at, PAGE) == (long)PAGE);
    }
    check(large, LEN, 1);
}

int main(int argc, char **argv) {
    if (argc > 1 && is(argv[1], "executed")) return call_blocked(), 6;
    itself = argv[0];
    static const struct test all[] = {
        {"info", info},           {"libc_sites", libc_sites}, {"ranges", ranges},   {"inclusive", inclusive},
        {"arguments", arguments}, {"ends", ends},             {"toggled", toggled}, {"threads", threads},
        {"inherited", inherited}, {"beside_signals", beside_signals}, {"folded", folded},
    };
    return RUN_NAMED(argc, argv, all);
}
