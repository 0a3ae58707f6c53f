/* Processes that fork while their other threads work on memory. Parent and child verify their
 * data. */
#include "common.h"
#include <sched.h>

enum { THREADS = 4, BLOCK_PAGES = 2 * UNIT / PAGE };
static const size_t LEN = 40 * UNIT;
static char *memory;
static volatile int stop;
static int raw; /* Change mappings by system-call instructions. */

/* Asserts that the child ended with status 5, which means that it found no wrong byte. */
static void need_right(pid_t pid) {
    int status = wait_for(pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 5) {
        fprintf(stderr, "a child ended with %x\n", status);
        fail("a child found all right", __FILE__, __LINE__);
    }
}

static long call(long number, long a, long b, long c, long d, long e, long f) {
    long result;
#ifdef __x86_64__
    if (raw) {
        register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
        __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
        NEED(result >= 0 || result < -4095);
        return result;
    }
#endif
    switch (number) {
    case SYS_munmap: result = munmap((void *)a, b); break;
    case SYS_madvise: result = madvise((void *)a, b, c); break;
    case SYS_mremap: result = (long)mremap((void *)a, b, c, d, (void *)e); break;
    default: result = (long)mmap((void *)a, b, c, d, e, f);
    }
    NEED(result != -1);
    return result;
}

static char *map_block(char *at, size_t len, int flags) {
    return (char *)call(SYS_mmap, (long)at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

/* The state of each thread, in memory that isn't folded: the address of its block, the last
 * written version of each page (0: none, zeros), and the pages that it is changing. */
static struct worker {
    char *volatile block;
    volatile uint32_t version[BLOCK_PAGES];
    volatile uint32_t first, last;
    volatile int moving;
    volatile uint64_t steps;
} worker[THREADS];

static uint64_t key_of(uint64_t me, uint64_t version, uint64_t page) { return me << 56 | version << 24 | page; }

static void write_page(uint64_t *at, uint64_t key) {
    for (unsigned w = 0; w < PAGE / 8; w++) at[w] = key ^ (w < 64 ? mix(w) : 0);
}

static void wrong_page(uint64_t me, uint64_t page, uint64_t found, uint64_t version) {
    char text[200];
    int n = snprintf(text, sizeof text, "WRONG: pid %d thread %lu page %lu: %lx, version should be %lx\n", getpid(), (unsigned long)me,
                     (unsigned long)page, (unsigned long)found, (unsigned long)version);
    (void)!write(2, text, n);
    _exit(98);
}

/* Verifies a page that no thread is writing. It has `version`, or a later one if `later` is set,
 * because a fork is no snapshot of pages under change. */
static void check_page(uint64_t me, uint64_t page, const uint64_t *at, uint64_t version, int later) {
    uint64_t key = at[0] ^ mix(0), found = key >> 24 & 0xffffffff;
    int zero = at[0] == 0 && at[63] == 0 && at[511] == 0;
    if (version == 0 && zero) return;
    if (zero || key >> 56 != me || (key & 0xffffff) != page || (later ? found < version : found != version))
        wrong_page(me, page, at[0], version);
    for (unsigned w = 0; w < PAGE / 8 && !later; w++)
        if (at[w] != (key ^ (w < 64 ? mix(w) : 0))) wrong_page(me, page, at[w], version);
}

static void *work(void *arg) {
    uint64_t me = (uintptr_t)arg, random = me + 77;
    struct worker *own = &worker[me];
    uint32_t next = 1;
    char *large = NULL;
    size_t large_len = 0;
    while (!stop) {
        random = mix(random);
        uint32_t first = random % BLOCK_PAGES, many = 1 + (random >> 20) % 32;
        if (first + many > BLOCK_PAGES) many = BLOCK_PAGES - first;
        unsigned what = (random >> 40) % 16;
        if (what == 2 || what == 3) first = 0, many = BLOCK_PAGES;
        own->first = first, own->last = first + many;
        own->moving = what == 2 || what == 3;
        __sync_synchronize();
        char *at = own->block + first * PAGE;
        uint32_t version = 0;
        switch (what) {
        case 0: call(SYS_madvise, (long)at, many * PAGE, MADV_DONTNEED, 0, 0, 0); break;
        case 1: map_block(at, many * PAGE, MAP_FIXED); break;
        case 2:
            /* In two parts. Another thread may map memory there in between. */
            call(SYS_munmap, (long)at, 64 * PAGE, 0, 0, 0, 0);
            call(SYS_munmap, (long)(at + 64 * PAGE), (BLOCK_PAGES - 64) * PAGE, 0, 0, 0, 0);
            own->block = map_block(NULL, BLOCK_PAGES * PAGE, 0);
            break;
        case 3: {
            /* Page by page, because the block may consist of several areas, over an existing
             * mapping. */
            char *to = map_block(NULL, BLOCK_PAGES * PAGE, 0);
            for (size_t p = 0; p < BLOCK_PAGES; p += 64) *(uint64_t *)(to + p * PAGE) = 1;
            for (size_t p = 0; p < BLOCK_PAGES; p++)
                call(SYS_mremap, (long)(own->block + p * PAGE), PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, (long)(to + p * PAGE), 0);
            own->block = to;
            break;
        }
        case 4: {
            /* libc's internal calls in malloc bypass the interposed functions. */
            size_t len = 256 * 1024 + (random >> 44) % 64 * 32768;
            char *now = large ? realloc(large, len) : malloc(len);
            NEED(now);
            size_t both = (large ? large_len < len ? large_len : len : 0) / PAGE;
            for (size_t p = 0; p < both; p++) NEED(*(uint64_t *)(now + p * PAGE) == key_of(me, 1, p));
            for (size_t p = 0; p < len / PAGE; p++) *(uint64_t *)(now + p * PAGE) = key_of(me, 1, p);
            large = now, large_len = len;
            if ((random >> 60) == 0) free(large), large = NULL;
            break;
        }
        case 5: case 6: case 7: case 8: version = next++; break;
        default:
            for (uint32_t p = first; p < first + many; p++) check_page(me, p, (uint64_t *)(own->block + p * PAGE), own->version[p], 0);
        }
        if (version)
            for (uint32_t p = first; p < first + many; p++) write_page((uint64_t *)(own->block + p * PAGE), key_of(me, version, p));
        if (version || what <= 2)
            for (uint32_t p = first; p < first + many; p++) own->version[p] = version;
        __sync_synchronize();
        own->first = own->last = 0;
        own->moving = 0;
        own->steps++;
    }
    for (uint32_t p = 0; p < BLOCK_PAGES; p++) check_page(me, p, (uint64_t *)(own->block + p * PAGE), own->version[p], 0);
    free(large);
    return NULL;
}

static pthread_t thread[THREADS];

static void start_workers(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    push_out(memory, LEN);
    for (long i = 0; i < THREADS; i++) {
        worker[i].block = map_block(NULL, BLOCK_PAGES * PAGE, 0);
        NEED(!pthread_create(&thread[i], NULL, work, (void *)i));
    }
}

static void end_workers(void) {
    stop = 1;
    uint64_t steps = 0;
    for (int i = 0; i < THREADS; i++) {
        NEED(!pthread_join(thread[i], NULL));
        steps += worker[i].steps;
    }
    fprintf(stderr, "%lu steps\n", (unsigned long)steps);
    check(memory, LEN, 1);
}

/* In a child: verifies the data of the parent's threads, except pages that they were changing.
 * Then changes all of it. */
static void check_workers(void) {
    for (uint64_t me = 0; me < THREADS; me++) {
        struct worker *own = &worker[me];
        if (own->moving) continue;
        for (uint32_t p = 0; p < BLOCK_PAGES; p++)
            if (p < own->first || p >= own->last) check_page(me, p, (uint64_t *)(own->block + p * PAGE), own->version[p], 1);
        for (uint32_t p = 0; p < BLOCK_PAGES; p++)
            if (p < own->first || p >= own->last) write_page((uint64_t *)(own->block + p * PAGE), key_of(99, 1, p));
        for (uint32_t p = 0; p < BLOCK_PAGES; p++)
            if (p < own->first || p >= own->last) check_page(99, p, (uint64_t *)(own->block + p * PAGE), 1, 0);
    }
}

static void be_child(int round) {
    check_workers();
    size_t part = round % 5 * 8 * UNIT;
    check_from(memory + part, 8 * UNIT, 1, part / PAGE);
    fill_from(memory + part, 8 * UNIT, 2, part / PAGE);
    char *own = malloc(2 * UNIT);
    fill(own, 2 * UNIT, 3);
    check_from(memory + part, 8 * UNIT, 2, part / PAGE);
    check(own, 2 * UNIT, 3);
    free(own);
    _exit(5);
}

static int rounds = 30;

/* Forks while other threads change mappings. */
static void race(void) {
    start_workers();
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    int round = 0;
    do {
        pid_t pid = round % 8 == 7 ? syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
        NEED(pid >= 0);
        if (pid == 0) be_child(round);
        if (round % 3 == 0) check_from(memory + round % 5 * 8 * UNIT, 8 * UNIT, 1, round % 5 * 8 * UNIT / PAGE);
        need_right(pid);
        clock_gettime(CLOCK_MONOTONIC, &now);
        /* On busy CPUs fewer rounds, but never fewer than three. */
    } while (++round < rounds && (round < 3 || now.tv_sec - begin.tv_sec < 12));
    fprintf(stderr, "%d rounds, ", round);
    end_workers();
}

/* Several threads fork at once. None of them is the first thread. */
static void *fork_in_thread(void *arg) {
    for (int round = 0; round < 4; round++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) be_child((uintptr_t)arg + round);
        need_right(pid);
    }
    return NULL;
}

static void elsewhere(void) {
    start_workers();
    pthread_t forker[3];
    for (long i = 0; i < 3; i++) NEED(!pthread_create(&forker[i], NULL, fork_in_thread, (void *)i));
    for (int i = 0; i < 3; i++) NEED(!pthread_join(forker[i], NULL));
    end_workers();
}

/* Starts other programs. */
static void *spawn_in_thread(void *arg) {
    for (int round = 0; round < 4; round++) {
        pid_t pid = vfork();
        if (pid == 0) {
            execl("/bin/sh", "sh", "-c", "exit 7", NULL);
            _exit(1);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 7);
        spawn_and_system();
        pid = fork();
        if (pid == 0) {
            execl("/bin/sh", "sh", "-c", "exit 10", NULL);
            _exit(1);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 10);
        /* The caller waits until the child executes a program (CLONE_VFORK), but shares no
         * memory with it. */
        pid = syscall(SYS_clone, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0);
        if (pid == 0) {
            execl("/bin/sh", "sh", "-c", "exit 11", NULL);
            _exit(1);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 11);
    }
    return arg;
}

static void spawn(void) {
    start_workers();
    pthread_t other[2];
    for (long i = 0; i < 2; i++) NEED(!pthread_create(&other[i], NULL, spawn_in_thread, NULL));
    for (int i = 0; i < 2; i++) NEED(!pthread_join(other[i], NULL));
    end_workers();
}

static void *sleeper(void *arg) {
    while (!stop) usleep(1000);
    return arg;
}

/* A program with threads becomes a daemon. The grandchild starts threads, and forks again. */
static void daemonize(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    push_out(memory, LEN);
    NEED(!pthread_create(&thread[0], NULL, sleeper, NULL));
    usleep(50000);
    int ends[2];
    char c = 0;
    NEED(pipe(ends) == 0);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        NEED(setsid() > 0);
        pid_t second = fork();
        NEED(second >= 0);
        if (second) _exit(5);
        check(memory, LEN, 1);
        fill(memory, LEN, 4);
        NEED(!pthread_create(&thread[1], NULL, sleeper, NULL));
        usleep(50000);
        pid_t third = fork();
        NEED(third >= 0);
        if (third == 0) {
            check(memory, LEN, 4);
            _exit(5);
        }
        need_right(third);
        check(memory, LEN, 4);
        NEED(write(ends[1], "r", 1) == 1);
        _exit(0);
    }
    close(ends[1]);
    need_right(pid);
    NEED(read(ends[0], &c, 1) == 1 && c == 'r');
    stop = 1;
    NEED(!pthread_join(thread[0], NULL));
    check(memory, LEN, 1);
}

/* A fork loads no folded memory, in the parent or in the child. */
static void kept(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    NEED(!pthread_create(&thread[0], NULL, sleeper, NULL));
    for (int i = 0; i < 3; i++) {
        push_out(memory, LEN);
        pid_t pid = fork();
        NEED(pid >= 0);
        NEED(present(memory, LEN) <= LEN / PAGE * 3 / 4);
        if (pid == 0) {
            check(memory, LEN, 1);
            fill(memory, LEN, 2);
            push_out(memory, LEN); /* The child is managed too. */
            check(memory, LEN, 2);
            _exit(5);
        }
        check(memory, LEN, 1);
        need_right(pid);
    }
    stop = 1;
    NEED(!pthread_join(thread[0], NULL));
}

static void on_crash(int signal, siginfo_t *info, void *context) {
    char text[300];
    (void)signal, (void)context;
    int n = snprintf(text, sizeof text, "CRASH: pid %d at %p; blocks", getpid(), info->si_addr);
    for (int i = 0; i < THREADS; i++) n += snprintf(text + n, sizeof text - n, " %p(%u-%u %d)", worker[i].block, worker[i].first, worker[i].last, worker[i].moving);
    text[n++] = '\n';
    (void)!write(2, text, n);
    _exit(97);
}

int main(int argc, char **argv) {
    struct sigaction action = {.sa_sigaction = on_crash, .sa_flags = SA_SIGINFO};
    NEED(sigaction(SIGSEGV, &action, NULL) == 0);
    NEED(argc == 2);
    /* `few_libc` is `libc` in fewer rounds. */
    const char *name = argv[1];
    if (!strncmp(name, "few_", 4)) rounds = 10, name += 4;
    if (is(name, "libc")) race();
    else if (is(name, "raw")) raw = 1, race();
    else if (is(name, "elsewhere")) elsewhere();
    else if (is(name, "spawn")) spawn();
    else if (is(name, "daemon")) daemonize();
    else if (is(name, "kept")) kept();
    else return 2;
    puts("right");
    return 0;
}
