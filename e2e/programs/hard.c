/* Uses of memory and processes that are hard to support. */
#include "common.h"
#include <dlfcn.h>
#include <linux/filter.h>
#include <linux/kcmp.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <ucontext.h>

static const size_t LEN = 48 * UNIT;
static char *memory;

static void folded(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    push_out(memory, LEN);
}

/* Five processes share folded memory. Each writes to a part of its own, and all fold it again. */
static void five(void) {
    folded();
    enum { CHILDREN = 4 };
    int go[2], ready[2];
    pid_t pids[CHILDREN];
    NEED(pipe(go) == 0 && pipe(ready) == 0);
    for (int i = 0; i < CHILDREN; i++) {
        NEED((pids[i] = fork()) >= 0);
        if (pids[i]) continue;
        char c;
        close(go[1]);
        check(memory, LEN, 1);
        NEED(write(ready[1], "r", 1) == 1 && read(go[0], &c, 1) == 0);
        for (int round = 0; round < 3; round++) {
            char *part = memory + i * 8 * UNIT;
            fill_from(part, 8 * UNIT, 10 + round, i * 8 * UNIT / PAGE);
            char *more = map(16 * UNIT);
            fill(more, 16 * UNIT, 5);
            check_from(memory, i * 8 * UNIT, 1, 0);
            check_from(part, 8 * UNIT, 10 + round, i * 8 * UNIT / PAGE);
            check_from(part + 8 * UNIT, LEN - (i + 1) * 8 * UNIT, 1, (i + 1) * 8 * UNIT / PAGE);
            check(more, 16 * UNIT, 5);
            NEED(munmap(more, 16 * UNIT) == 0);
        }
        _exit(10 + i);
    }
    for (int i = 0; i < CHILDREN; i++) {
        char c;
        NEED(read(ready[0], &c, 1) == 1);
    }
    close(go[1]);
    fill(memory + 40 * UNIT, 8 * UNIT, 3);
    check(memory, 40 * UNIT, 1);
    for (int i = 0; i < CHILDREN; i++) NEED(WEXITSTATUS(wait_for(pids[i])) == 10 + i);
    push_out(memory, LEN);
    check(memory, 40 * UNIT, 1);
    check(memory + 40 * UNIT, 8 * UNIT, 3);
}

enum { LOCKS = 200 };
struct lock {
    pthread_mutex_t mutex;
    char rest[2 * PAGE - sizeof(pthread_mutex_t)];
};
static struct lock *locks;
static pthread_barrier_t both;

static void *own_and_end(void *how) {
    for (int i = 0; i < LOCKS; i++) {
        int owned = pthread_mutex_lock(&locks[i].mutex);
        NEED(owned == 0 || (owned == EOWNERDEAD && !pthread_mutex_consistent(&locks[i].mutex)));
    }
    pthread_barrier_wait(&both);
    pthread_barrier_wait(&both);
    if (how) pthread_exit(NULL);
    return NULL;
}

/* When a thread ends, the kernel walks the thread's robust locks and marks each. All of them are
 * folded. */
static void robust(void) {
    folded();
    locks = (struct lock *)map(LOCKS * sizeof *locks);
    pthread_mutexattr_t about;
    NEED(!pthread_mutexattr_init(&about) && !pthread_mutexattr_setrobust(&about, PTHREAD_MUTEX_ROBUST));
    for (int i = 0; i < LOCKS; i++) NEED(!pthread_mutex_init(&locks[i].mutex, &about));
    NEED(!pthread_barrier_init(&both, NULL, 2));
    for (long round = 0; round < 4; round++) {
        pthread_t thread;
        NEED(!pthread_create(&thread, NULL, own_and_end, (void *)(round & 1)));
        pthread_barrier_wait(&both);
        for (int i = 0; i < 3; i++) fill(filler, 48 * UNIT, i);
        pthread_barrier_wait(&both);
        NEED(!pthread_join(thread, NULL));
        for (int i = 0; i < LOCKS; i++) {
            NEED(pthread_mutex_trylock(&locks[i].mutex) == EOWNERDEAD && !pthread_mutex_consistent(&locks[i].mutex));
            NEED(!pthread_mutex_unlock(&locks[i].mutex));
        }
    }
    check(memory, LEN, 1);
}

enum { BEFORE = 50 };
static struct lock *behind;

static void take_all(void) {
    NEED(!pthread_mutex_lock(&behind->mutex));
    for (int i = 0; i < BEFORE; i++) NEED(!pthread_mutex_lock(&locks[i].mutex));
}

static void *take_all_and_stay(void *none) {
    take_all();
    pthread_barrier_wait(&both);
    for (;;) pause();
    return NULL;
}

/* At the end of a process and at exec, the kernel's walk reaches a lock in shared memory that
 * comes after folded locks, in all threads. */
static void ends(void) {
    folded();
    behind = mmap(NULL, sizeof *behind, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_mutexattr_t about;
    NEED(!pthread_mutexattr_init(&about) && !pthread_mutexattr_setrobust(&about, PTHREAD_MUTEX_ROBUST));
    NEED(!pthread_mutexattr_setpshared(&about, PTHREAD_PROCESS_SHARED) && !pthread_mutex_init(&behind->mutex, &about));
    NEED(!pthread_mutexattr_setpshared(&about, PTHREAD_PROCESS_PRIVATE));
    for (int way = 0; way < 4; way++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            pthread_t thread;
            locks = (struct lock *)map(BEFORE * sizeof *locks);
            for (int i = 0; i < BEFORE; i++) NEED(!pthread_mutex_init(&locks[i].mutex, &about));
            NEED(!pthread_barrier_init(&both, NULL, 2));
            if (way & 1) {
                NEED(!pthread_create(&thread, NULL, take_all_and_stay, NULL));
                pthread_barrier_wait(&both);
            } else
                take_all();
            page_out(locks, BEFORE * sizeof *locks, BEFORE / 2);
            if (way < 2) _exit(7);
            NEED(execl("/no/such/program", "sh", NULL) == -1);
            execl("/bin/sh", "sh", "-c", "exit 7", NULL);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 7);
        NEED(pthread_mutex_trylock(&behind->mutex) == EOWNERDEAD && !pthread_mutex_consistent(&behind->mutex));
        NEED(!pthread_mutex_unlock(&behind->mutex));
    }
    check(memory, LEN, 1);
}

/* Calls by which children of vfork execute other programs hold their arguments no longer than
 * the call. */
static void spawns(void) {
    folded();
    char **args = (char **)map(UNIT), *name = strcpy((char *)(args + 8), "/bin/true");
    args[0] = name;
    for (int i = 0; i < 300; i++) {
        pid_t pid = vfork();
        if (pid == 0) {
            execv(name, args);
            _exit(9);
        }
        NEED(wait_for(pid) == 0);
    }
    check(memory, LEN, 1);
    push_out(memory, LEN);
    check(memory, LEN, 1);
}

static void *affinity_of_thread(void *set) {
    NEED(pthread_getaffinity_np(pthread_self(), sizeof(cpu_set_t), set) == 0);
    return NULL;
}

static void same_affinity(const cpu_set_t *as) {
    cpu_set_t now, its;
    pthread_t thread;
    NEED(sched_getaffinity(0, sizeof now, &now) == 0 && CPU_EQUAL(&now, as));
    NEED(!pthread_create(&thread, NULL, affinity_of_thread, &its) && !pthread_join(thread, NULL) && CPU_EQUAL(&its, as));
}

/* The set of allowed processors is unchanged. */
static void affinity(void) {
    cpu_set_t before, one;
    NEED(sched_getaffinity(0, sizeof before, &before) == 0);
    folded();
    same_affinity(&before);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    NEED(sched_setaffinity(0, sizeof one, &one) == 0);
    check(memory, LEN, 1);
    push_out(memory, LEN);
    same_affinity(&one);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        check(memory, LEN, 1);
        push_out(memory, LEN);
        same_affinity(&one);
        _exit(7);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 7);
    NEED(sched_setaffinity(0, sizeof before, &before) == 0);
    check(memory, LEN, 1);
    same_affinity(&before);
}

static volatile int stop;
static char *discarded;
static const size_t DISCARDED = 8 * UNIT;

static void *discard(void *arg) {
    for (uint64_t i = 0; !stop; i++) {
        NEED(madvise(discarded + i % 8 * UNIT, UNIT, MADV_DONTNEED) == 0);
        *(uint64_t *)(discarded + mix(i) % (DISCARDED / PAGE) * PAGE) = 7;
    }
    return NULL;
}

static void *visit(void *arg) {
    for (uint64_t i = 0, at = (uintptr_t)arg; i < 60; i++, at = mix(at)) {
        size_t page = at % (LEN / PAGE);
        check_from(memory + page * PAGE, PAGE, 1, page);
        uint64_t seen = *(volatile uint64_t *)(discarded + at % (DISCARDED / PAGE) * PAGE);
        NEED(seen == 0 || seen == 7);
    }
    return NULL;
}

/* Three hundred threads use folded pages on one CPU, while another thread discards. */
static void crowd(void) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    NEED(sched_setaffinity(0, sizeof one, &one) == 0);
    folded();
    discarded = map(DISCARDED);
    enum { THREADS = 300 };
    pthread_t thread[THREADS], other;
    NEED(!pthread_create(&other, NULL, discard, NULL));
    for (uintptr_t i = 0; i < THREADS; i++) NEED(!pthread_create(&thread[i], NULL, visit, (void *)(i + 1)));
    for (int i = 0; i < THREADS; i++) NEED(!pthread_join(thread[i], NULL));
    stop = 1;
    NEED(!pthread_join(other, NULL));
    check(memory, LEN, 1);
}

static const char LIBRARY[] =
    "#include <pthread.h>\n#include <string.h>\n#include <stdlib.h>\n"
    "static char *blocks[64];\nint ran;\n"
    "static void *work(void *arg) { long n = (long)arg; blocks[n] = malloc(300000); memset(blocks[n], n, 300000);"
    " __atomic_fetch_add(&ran, 1, __ATOMIC_SEQ_CST); return 0; }\n"
    "static pthread_t thread[64];\n"
    "__attribute__((constructor)) static void begin(void) { for (long i = 0; i < 64; i++) if (pthread_create(&thread[i], 0, work, (void *)i)) abort(); }\n"
    "int check(void) { for (long i = 0; i < 64; i++) { pthread_join(thread[i], 0);"
    " for (int k = 0; k < 300000; k++) if (blocks[i][k] != i) return -1; } return ran; }\n";

/* A library whose constructor starts threads is loaded while all memory is folded. */
static void constructor(void) {
    char name[64] = "/tmp/memfold-library-XXXXXX", text[256];
    NEED(mkdtemp(name));
    size_t end = strlen(name);
    strcpy(name + end, "/l.c");
    FILE *f = fopen(name, "w");
    NEED(f && fputs(LIBRARY, f) >= 0 && fclose(f) == 0);
    name[end] = 0;
    snprintf(text, sizeof text, "cc -shared -fPIC -pthread -o %s/l.so %s/l.c", name, name);
    NEED(system(text) == 0);
    folded();
    strcpy(name + end, "/l.so");
    void *library = dlopen(name, RTLD_NOW);
    NEED(library);
    int (*its_check)(void) = dlsym(library, "check");
    push_out(memory, LEN);
    NEED(its_check && its_check() == 64);
    check(memory, LEN, 1);
    unlink(name);
    strcpy(name + end, "/l.c");
    unlink(name);
    name[end] = 0;
    rmdir(name);
}

enum { FORKS = 300 };
static volatile long forked, failed_children;

/* Asks for one signal in a millisecond. With a periodic timer, a signal would always be pending
 * where forks take longer, and the program would make no progress. */
static void ask_for_signal(void) {
    struct itimerval soon = {{0, 0}, {0, 1000}};
    NEED(setitimer(ITIMER_REAL, &soon, NULL) == 0);
}

static void fork_here(int signal) {
    int saved = errno, status;
    pid_t pid = _Fork();
    if (pid == 0) {
        size_t page = mix(forked) % (LEN / PAGE);
        check_from(memory + page * PAGE, PAGE, 1, page);
        _exit(0);
    }
    if (pid > 0) forked++;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) failed_children += status != 0;
    if (forked < FORKS) ask_for_signal();
    errno = saved;
}

/* A handler that forks, nearly a thousand times a second. */
static void fork_in_handler(void) {
    folded();
    struct sigaction action = {.sa_handler = fork_here, .sa_flags = SA_RESTART};
    NEED(sigaction(SIGALRM, &action, NULL) == 0);
    ask_for_signal();
    char *other = map(8 * UNIT);
    for (int round = 0; forked < FORKS; round++) {
        fill(other, 8 * UNIT, round);
        free(malloc(200000));
        check_from(memory + round % 6 * 8 * UNIT, 8 * UNIT, 1, round % 6 * 8 * UNIT / PAGE);
        check(other, 8 * UNIT, round);
    }
    int status;
    while (wait(&status) > 0 || errno == EINTR) failed_children += status != 0;
    NEED(failed_children == 0);
    check(memory, LEN, 1);
}

static void *fill_and_check(void *arg) {
    char *own = map(4 * UNIT);
    for (int i = 0; i < 20; i++) {
        fill(own, 4 * UNIT, (uintptr_t)arg + i);
        check(own, 4 * UNIT, (uintptr_t)arg + i);
        check_from(memory + i % 6 * 8 * UNIT, 8 * UNIT, 1, i % 6 * 8 * UNIT / PAGE);
    }
    return NULL;
}

/* A filter for all threads, memfold's included: allowed calls work, and refused calls fail. */
static void filter_for_all(void) {
    folded();
    pthread_t thread[8];
    for (uintptr_t i = 0; i < 4; i++) NEED(!pthread_create(&thread[i], NULL, fill_and_check, (void *)(i * 100)));
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_getppid, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EXDEV),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mount, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof code / sizeof *code, code};
    NEED(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    NEED(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter) == 0);
    NEED(syscall(SYS_getppid) == -1 && errno == EXDEV);
    for (uintptr_t i = 4; i < 8; i++) NEED(!pthread_create(&thread[i], NULL, fill_and_check, (void *)(i * 100)));
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        NEED(syscall(SYS_getppid) == -1 && errno == EXDEV);
        check(memory, LEN, 1);
        fill(memory, LEN, 2);
        check(memory, LEN, 2);
        syscall(SYS_mount, 0, 0, 0, 0, 0);
        _exit(1);
    }
    int status = wait_for(pid);
    NEED(WIFSIGNALED(status) && WTERMSIG(status) == SIGSYS);
    for (int i = 0; i < 8; i++) NEED(!pthread_join(thread[i], NULL));
    check(memory, LEN, 1);
}

enum { COROUTINES = 200, ROUNDS = 15, STACK = 64 << 10 };
static ucontext_t home, each[COROUTINES];
static volatile long ticks;
static long ended;

static void tick(int signal, siginfo_t *info, void *context) {
    char local[600];
    memset(local, signal, sizeof local);
    ticks += local[(unsigned)ticks % sizeof local] == SIGALRM;
}

static void coroutine(int self) {
    char local[20000];
    double sum = 0;
    memset(local, self, sizeof local);
    for (int i = 0; i < ROUNDS; i++) {
        sum += self * 0.5;
        if (i % 4 == 0) getppid();
        swapcontext(&each[self], &home);
        for (unsigned j = 0; j < sizeof local; j++) NEED(local[j] == (char)self);
        NEED(sum == (i + 1) * (self * 0.5));
    }
    ended++;
}

/* Coroutine stacks in the heap are folded, and signals arrive on them. */
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
    struct sigaction action = {.sa_sigaction = tick, .sa_flags = SA_SIGINFO | SA_RESTART};
    NEED(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    NEED(setitimer(ITIMER_REAL, &often, NULL) == 0);
    for (int round = 0; round <= ROUNDS; round++) {
        for (int i = 0; i < COROUTINES; i++) swapcontext(&home, &each[i]);
        check_from(memory + round % 3 * 16 * UNIT, 16 * UNIT, 1, round % 3 * 16 * UNIT / PAGE);
    }
    NEED(setitimer(ITIMER_REAL, &never, NULL) == 0);
    NEED(ended == COROUTINES && ticks > 10);
    check(memory, LEN, 1);
}

/* A crash ends the program as without memfold, with and without a core dump. */
static void crash(void) {
    folded();
    char directory[] = "/tmp/memfold-crash-XXXXXX";
    NEED(mkdtemp(directory) && chdir(directory) == 0);
    for (int way = 0; way < 4; way++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            struct rlimit core = {way & 1 ? RLIM_INFINITY : 0, way & 1 ? RLIM_INFINITY : 0};
            (void)setrlimit(RLIMIT_CORE, &core);
            check(memory, LEN / 4, 1);
            if (way < 2) *(volatile int *)8 = 1;
            abort();
        }
        int status = wait_for(pid);
        NEED(WIFSIGNALED(status) && WTERMSIG(status) == (way < 2 ? SIGSEGV : SIGABRT));
    }
    NEED(system("rm -f core*") == 0 && chdir("/") == 0 && rmdir(directory) == 0);
    check(memory, LEN, 1);
}

/* A process without threads has no list of semaphores to undo, and neither has its child. */
static void undo(void) {
    folded();
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        check(memory, LEN, 1);
        for (;;) pause();
    }
    NEED(syscall(SYS_kcmp, getpid(), pid, KCMP_SYSVSEM, 0, 0) == 0);
    NEED(kill(pid, SIGKILL) == 0 && WIFSIGNALED(wait_for(pid)));
    check(memory, LEN, 1);
}

#ifdef __x86_64__
/* Calls libc's pread with a pattern in the vector registers, and stores their contents after the
 * call. This function uses no vector register itself. */
__attribute__((target("avx2"), noinline)) static long pread_between(const void *before, void *after, int file, void *to, size_t len) {
    register const void *in asm("r12") = before;
    register void *out asm("r13") = after;
    long result, a = file, b = (long)to, c = len;
    asm volatile("mov %%rsp, %%r14; lea -128(%%rsp), %%rsp; and $-32, %%rsp\n\t"
                 ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15; vmovdqu 32*\\n(%%r12), %%ymm\\n; .endr\n\t"
                 "xor %%ecx, %%ecx; call pread@PLT\n\t"
                 ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15; vmovdqu %%ymm\\n, 32*\\n(%%r13); .endr\n\t"
                 "mov %%r14, %%rsp"
                 : "=a"(result), "+D"(a), "+S"(b), "+d"(c)
                 : "r"(in), "r"(out)
                 : "rcx", "r8", "r9", "r10", "r11", "r14", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6",
                   "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
    return result;
}

/* The kernel changes no vector register in a call, so the gate must not either. libc itself
 * preserves these registers where it may copy with AVX-512, so the test forbids AVX-512. Ends by
 * executing another program. */
static void registers(void) {
    if (!__builtin_cpu_supports("avx2")) return;
    if (!getenv("GLIBC_TUNABLES")) {
        NEED(setenv("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX512F,-AVX512VL", 1) == 0);
        execl("/proc/self/exe", "hard", "registers", NULL);
        NEED(0);
    }
    unsigned char before[512], after[512], bytes[4096];
    for (size_t i = 0; i < sizeof before; i++) before[i] = mix(i);
    int file = open("/proc/self/exe", O_RDONLY);
    NEED(file >= 0);
    folded();
    for (size_t round = 0; round < LEN / PAGE; round++) {
        char *to = round % 2 ? memory + round * PAGE : (char *)bytes;
        NEED(pread_between(before, after, file, to, PAGE) == PAGE);
        NEED(memcmp(before, after, sizeof before) == 0);
    }
}
#else
static void registers(void) {}
#endif

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"five", five},
        {"robust", robust},
        {"ends", ends},
        {"spawns", spawns},
        {"affinity", affinity},
        {"crowd", crowd},
        {"constructor", constructor},
        {"handler", fork_in_handler},
        {"filter", filter_for_all},
        {"coroutines", coroutines},
        {"crash", crash},
        {"undo", undo},
        {"registers", registers},
    };
    return RUN_NAMED(argc, argv, all);
}
