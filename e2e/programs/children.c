/* Child processes of a program with folded memory. */
#include "common.h"
#include <dlfcn.h>
#include <sched.h>
#include <semaphore.h>

static const size_t LEN = 64 * UNIT;
static char *memory;

static void folded(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    push_out(memory, LEN);
}

static void other_programs(void) {
    folded();
    for (int i = 0; i < 5; i++) {
        pid_t pid = vfork();
        if (pid == 0) {
            /* The child of vfork uses the parent's memory, so the parent's engine serves its
             * faults. */
            volatile char touched = 0;
            for (size_t at = 0; at < LEN; at += 501 * PAGE) touched += memory[at];
            execl("/bin/sh", "sh", "-c", "exit 7", NULL);
            _exit(1);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 7);
        spawn_and_system();
        FILE *f = popen("echo hello", "r");
        char line[16];
        NEED(f && fgets(line, sizeof line, f) && is(line, "hello\n") && pclose(f) == 0);
        check_from(memory + i * 8 * UNIT, 8 * UNIT, 1, i * 8 * UNIT / PAGE);
        push_out(memory, LEN);
    }
    check(memory, LEN, 1);
}

static void both_verify(uint64_t seed) {
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        check(memory, LEN, seed);
        fill(memory, LEN, 99); /* The parent must not see this. */
        check(memory, LEN, 99);
        _exit(5);
    }
    check(memory, LEN, seed);
    fill(memory, LEN, seed + 1); /* Nor the child that. */
    NEED(WEXITSTATUS(wait_for(pid)) == 5);
    check(memory, LEN, seed + 1);
}

static void fork_right(void) {
    folded();
    for (int i = 0; i < 3; i++) both_verify(1 + i);
    push_out(memory, LEN); /* The parent folds again. */
    check(memory, LEN, 4);
}

/* Pages that were only read since they were folded are clean. The child has no write protection
 * on them, so its engine must not treat them as clean. */
static void reread(void) {
    folded();
    for (int i = 0; i < 3; i++) {
        read_apart(memory, LEN, 1);
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            fill_apart(memory, LEN, 2);
            push_out(memory, LEN);
            check_apart(memory, LEN, 1, 2);
            _exit(5);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 5);
        push_out(memory, LEN);
        check(memory, LEN, 1);
    }
}

/* The parent stays over its limit while a child shares its pages. It must neither spin nor
 * corrupt data. */
static void long_lived_child(void) {
    folded();
    int ends[2];
    NEED(pipe(ends) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        char c;
        close(ends[1]);
        NEED(read(ends[0], &c, 1) == 0);
        check(memory, LEN, 1);
        _exit(6);
    }
    close(ends[0]);
    struct timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    usleep(1000000);
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b);
    double idle = b.tv_sec - a.tv_sec + (b.tv_nsec - a.tv_nsec) / 1e9;
    fprintf(stderr, "processor time in one idle second: %.3f s\n", idle);
    char *more = map(32 * UNIT);
    fill(more, 32 * UNIT, 2);
    check(memory, LEN, 1);
    check(more, 32 * UNIT, 2);
    close(ends[1]);
    NEED(WEXITSTATUS(wait_for(pid)) == 6);
    push_out(memory, LEN);
    check(memory, LEN, 1);
    check(more, 32 * UNIT, 2);
    NEED(idle < 0.5);
}

static void *work(void *arg) {
    uint64_t me = (uintptr_t)arg;
    char *own = map(6 * UNIT);
    for (uint64_t i = 0; i < 30; i++) {
        fill(own, 6 * UNIT, me * 1000 + i);
        NEED(madvise(own + (i % 5) * UNIT, UNIT, MADV_DONTNEED) == 0);
        check_zero(own + (i % 5) * UNIT, UNIT);
        fill_from(own + (i % 5) * UNIT, UNIT, me * 1000 + i, (i % 5) * UNIT / PAGE);
        check(own, 6 * UNIT, me * 1000 + i);
        free(malloc(1000 + i * 100));
    }
    return NULL;
}

static void fork_threads(void) {
    folded();
    pthread_t thread[6];
    for (long i = 0; i < 6; i++) NEED(!pthread_create(&thread[i], NULL, work, (void *)i));
    for (int i = 0; i < 6; i++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            char *own = malloc(UNIT);
            fill(own, UNIT, 3);
            check(memory, LEN, 1);
            check(own, UNIT, 3);
            exit(4);
        }
        check(memory, LEN, 1);
        NEED(WEXITSTATUS(wait_for(pid)) == 4);
    }
    for (int i = 0; i < 6; i++) NEED(!pthread_join(thread[i], NULL));
    check(memory, LEN, 1);
}

static sem_t go_on;

static pthread_key_t keys[40];

static void *idle(void *arg) {
    for (int i = 0; i < 40; i++) NEED(!pthread_setspecific(keys[i], arg));
    sem_wait(&go_on);
    return arg;
}

/* In a child, libc touches the thread blocks, which lie in the threads' stacks, and the locks of
 * open files. Threads that are started without our pthread_create, as some libraries do, have
 * stacks that are folded. */
static void what_libc_touches(void) {
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(dlopen("libc.so.6", RTLD_NOW), "pthread_create");
    NEED(create);
    enum { IDLE = 20, FILES = 300 };
    pthread_t thread[IDLE];
    FILE *file[FILES];
    folded();
    for (int i = 0; i < 40; i++) NEED(!pthread_key_create(&keys[i], NULL));
    for (long i = 0; i < IDLE; i++) NEED(!create(&thread[i], NULL, idle, (void *)i));
    for (int i = 0; i < FILES; i++) {
        free(malloc(200 << 10));
        NEED((file[i] = fopen("/dev/null", "w")) && fputc('x', file[i]) == 'x');
    }
    for (int i = 0; i < 4; i++) {
        push_out(memory, LEN);
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            for (int f = 0; f < FILES; f++) NEED(fclose(file[f]) == 0);
            pthread_t one;
            NEED(!pthread_create(&one, NULL, work, NULL) && !pthread_join(one, NULL));
            check(memory, LEN, 1);
            _exit(5);
        }
        check(memory, LEN, 1);
        NEED(WEXITSTATUS(wait_for(pid)) == 5);
    }
    for (int i = 0; i < IDLE; i++) sem_post(&go_on);
    for (long i = 0; i < IDLE; i++) {
        void *result;
        NEED(!pthread_join(thread[i], &result) && result == (void *)i);
    }
}

static void fork_exec(char *self) {
    folded();
    setvbuf(stdout, malloc(8 * PAGE), _IOFBF, 8 * PAGE);
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            execl(self, self, "grandchild", NULL);
            _exit(1);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 0);
        check(memory, LEN, 1);
        push_out(memory, LEN);
    }
}

static int run_copy(void *unused) {
    (void)unused;
    for (size_t at = 0; at < LEN; at += PAGE)
        if (*(volatile uint64_t *)(memory + at) != word(page_key(1, at / PAGE), 0)) return 98;
    return 7;
}

static long without_libc(long number, long a) {
    long result;
#ifdef __x86_64__
    register long r10 __asm__("r10") = 0, r8 __asm__("r8") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(0l), "d"(0l), "r"(r10), "r"(r8) : "rcx", "r11", "memory");
#else
    result = syscall(number, a, 0, 0, 0, 0);
#endif
    return result;
}

/* Says how a child ended, if it did not exit with this code. */
static void need_exit(int status, int code) {
    if (status != code << 8) fprintf(stderr, "a child ended with status %x\n", status);
    NEED(WIFEXITED(status) && WEXITSTATUS(status) == code);
}

/* Children made without running the pthread_atfork handlers find every byte. */
static void copies(void) {
    folded();
    fflush(stdout);
    for (int way = 0; way < 5; way++) {
        struct { uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls; } args = {.exit_signal = SIGCHLD};
        static char stack[64 << 10] __attribute__((aligned(16)));
        push_out(memory, LEN);
        pid_t pid = way == 0   ? syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0)
                    : way == 1 ? _Fork()
                    : way == 2 ? syscall(SYS_clone3, &args, sizeof args)
                    : way == 3 ? clone(run_copy, stack + sizeof stack, SIGCHLD, NULL)
                               : without_libc(SYS_clone, SIGCHLD);
        if (pid == 0) _exit(run_copy(NULL));
        int status = wait_for(pid);
        check(memory, LEN, 1);
        need_exit(status, 7);
    }
}

/* A daemon: the parent ends, and the grandchild continues in a new session with every descriptor
 * closed. It is folded. */
static void daemonize(void) {
    int ends[2];
    folded();
    NEED(pipe(ends) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        NEED(setsid() > 0);
        pid_t second = fork();
        if (second) _exit(second > 0 ? 0 : 1);
        dup2(ends[1], 0);
        NEED(syscall(SYS_close_range, 1, ~0u, 0) == 0);
        NEED(open("/dev/null", O_RDWR) == 1 && open("/dev/null", O_RDWR) == 2);
        check(memory, LEN, 1);
        fill(memory, LEN, 2);
        push_out(memory, LEN);
        check(memory, LEN, 2);
        NEED(write(0, "r", 1) == 1);
        _exit(0);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 0);
    close(ends[1]);
    char byte;
    NEED(read(ends[0], &byte, 1) == 1 && byte == 'r');
    /* No process keeps a copy of the pipe's end, and neither does the engine. */
    NEED(read(ends[0], &byte, 1) == 0);
    check(memory, LEN, 1);
}

/* Closing all descriptors must not close the engine's. */
static void close_all(void) {
    folded();
    NEED(syscall(SYS_close_range, 3, ~0u, 0) == 0);
    for (int i = 0; i < 3; i++) {
        check(memory, LEN, 1);
        push_out(memory, LEN);
    }
    NEED(dup(1) == 3);
    pid_t pid = fork();
    if (pid == 0) {
        for (int fd = 3; fd < 1000; fd++) close(fd);
        check(memory, LEN, 1);
        execl("/bin/sh", "sh", "-c", "exit 7", NULL);
        _exit(1);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 7);
    check(memory, LEN, 1);
}

/* In each generation, a child changes a part, folds it, and forks its own child. */
static void generations(void) {
    folded();
    FILE *file = fopen("/dev/null", "w");
    for (int depth = 0; depth < 5; depth++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid) {
            int status = wait_for(pid);
            NEED(WIFEXITED(status) && WEXITSTATUS(status) == 9);
            check_from(memory + depth * 8 * UNIT, LEN - depth * 8 * UNIT, 1, depth * 8 * UNIT / PAGE);
            for (int d = 0; d < depth; d++) check_from(memory + d * 8 * UNIT, 8 * UNIT, 50 + d, d * 8 * UNIT / PAGE);
            if (depth) _exit(9);
            return;
        }
        fill_from(memory + depth * 8 * UNIT, 8 * UNIT, 50 + depth, depth * 8 * UNIT / PAGE);
        push_out(memory, LEN);
        NEED(file && fputs("x", file) >= 0 && fflush(file) == 0);
    }
    _exit(9);
}

/* Forks in a loop, with little work in each child. */
static void loop(void) {
    folded();
    for (int i = 0; i < 60; i++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        char *at = memory + i % 60 * UNIT;
        if (pid == 0) {
            check_from(at, UNIT, 1, i % 60 * UNIT / PAGE);
            _exit(5);
        }
        fill_from(at, UNIT, 1, i % 60 * UNIT / PAGE);
        NEED(WEXITSTATUS(wait_for(pid)) == 5);
    }
    check(memory, LEN, 1);
}

/* Moves a mapping to an unused address with one call. The kernel must still see it as one
 * mapping. */
static void move(size_t len) {
    char *to = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(to != MAP_FAILED);
    NEED(mremap(memory, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, to) == to);
    memory = to;
}

/* A mapping that grew before a fork, and whose new part is untouched. */
static void grown(void) {
    folded();
    memory = mremap(memory, LEN, 2 * LEN, MREMAP_MAYMOVE);
    NEED(memory != MAP_FAILED);
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            fill_from(memory + LEN + i * UNIT, UNIT, 2, i * UNIT / PAGE);
            check_zero(memory + LEN + (i + 1) * UNIT, UNIT);
            move(2 * LEN);
            check(memory, LEN, 1);
            check(memory + LEN, (i + 1) * UNIT, 2);
            _exit(5);
        }
        need_exit(wait_for(pid), 5);
        move(2 * LEN);
        fill_from(memory + LEN + i * UNIT, UNIT, 2, i * UNIT / PAGE);
        check(memory, LEN, 1);
    }
    check(memory + LEN, 3 * UNIT, 2);
}

/* clone3 with fields of a future kernel: unknown zeros are accepted, other values are refused. */
static void later(void) {
    folded();
    uint64_t *args = map(2 * UNIT);
    args[4] = SIGCHLD;
    static const size_t sizes[] = {64, 88, 96, 256, 264, 1000, PAGE};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        pid_t pid = syscall(SYS_clone3, args, sizes[i]);
        if (pid == 0) {
            check(memory, LEN, 1);
            _exit(5);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 5);
    }
    NEED(syscall(SYS_clone3, args, PAGE + 8) == -1 && errno == E2BIG);
    NEED(syscall(SYS_clone3, args, 56ul) == -1 && errno == EINVAL);
    for (size_t at = 88; at < PAGE; at += 88) {
        ((char *)args)[at] = 1;
        NEED(syscall(SYS_clone3, args, PAGE) == -1 && errno == E2BIG);
        ((char *)args)[at] = 0;
    }
    char *end = (char *)args + UNIT;
    NEED(!mprotect(end, UNIT, PROT_NONE));
    memcpy(end - 512, args, 512);
    NEED(syscall(SYS_clone3, end - 512, PAGE) == -1 && errno == EFAULT);
}

/* Counts the pages of `[at, at + len)` that are in the kernel's swap. */
static size_t swapped(void *at, size_t len) {
    int fd = open("/proc/self/pagemap", O_RDONLY);
    size_t n = 0;
    uint64_t entry;
    for (size_t p = 0; p < len; p += PAGE) {
        NEED(pread(fd, &entry, 8, ((uintptr_t)at + p) / PAGE * 8) == 8);
        n += entry >> 62 & 1;
    }
    close(fd);
    return n;
}

/* A child reads single pages, and the kernel swaps them out. The child then reads the pages around
 * them, so that each is folded with its block while it is in the kernel's swap. The engine uses its
 * frame for other pages later. */
static void swap_of_read(void) {
    folded();
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        size_t most = 0;
        for (int i = 0; i < 4; i++) {
            read_apart(memory, LEN, 1);
            size_t pages = LEN / APART, now = 0;
            for (int n = 0; n < 1000 && now < pages / 2; n++) usleep(1000), now = swapped(memory, LEN);
            most = now > most ? now : most;
            for (size_t p = 0; p < LEN; p += PAGE)
                if (p % APART) check_from(memory + p, PAGE, 1, p / PAGE);
            push_out(memory, LEN);
        }
        check(memory, LEN, 1);
        NEED(most > 0);
        _exit(5);
    }
    need_exit(wait_for(pid), 5);
    check(memory, LEN, 1);
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    if (is(argv[1], "spawn")) other_programs();
    else if (is(argv[1], "fork")) fork_right();
    else if (is(argv[1], "long")) long_lived_child();
    else if (is(argv[1], "threads")) fork_threads();
    else if (is(argv[1], "libc")) what_libc_touches();
    else if (is(argv[1], "exec")) fork_exec(argv[0]);
    else if (is(argv[1], "grandchild")) { folded(); check(memory, LEN, 1); return 0; }
    else if (is(argv[1], "copies")) copies();
    else if (is(argv[1], "daemon")) daemonize();
    else if (is(argv[1], "close")) close_all();
    else if (is(argv[1], "generations")) generations();
    else if (is(argv[1], "loop")) loop();
    else if (is(argv[1], "grown")) grown();
    else if (is(argv[1], "reread")) reread();
    else if (is(argv[1], "later")) later();
    else if (is(argv[1], "swapped")) swap_of_read();
    else return 2;
    puts("right");
    return 0;
}
