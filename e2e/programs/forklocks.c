/* Threads repeat calls that take memfold's locks, while the first thread forks. Each child makes
 * each of these calls once and ends. A child that inherits a held lock would wait for ever. */
#include "common.h"
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>

enum { FORKS = 300, FEW_FORKS = 90, CHILD_SECONDS = 60 };
static const size_t LEN = 40 * UNIT;
static char *memory;
static volatile int stop;

static void map_and_unmap(void) {
    char *p = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(p != MAP_FAILED);
    p[0] = 1;
    NEED(munmap(p, 16 * PAGE) == 0);
}

static void move(void) {
    char *p = mmap(NULL, 32 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(p != MAP_FAILED);
    p[PAGE] = 1;
    char *to = mremap(p, 32 * PAGE, 64 * PAGE, MREMAP_MAYMOVE);
    NEED(to != MAP_FAILED && to[PAGE] == 1 && munmap(to, 64 * PAGE) == 0);
}

static void set_limits(void) {
    int all[] = {RLIMIT_AS, RLIMIT_NOFILE};
    for (int i = 0; i < 2; i++) {
        struct rlimit limit;
        NEED(getrlimit(all[i], &limit) == 0 && setrlimit(all[i], &limit) == 0);
    }
}

/* A new range each time, so that a fault there asks whose it is. */
static void register_faults(void) {
    int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    if (fd < 0) return; /* The system forbids it. */
    struct uffdio_api api = {.api = UFFD_API};
    NEED(ioctl(fd, UFFDIO_API, &api) == 0);
    char *p = map(16 * PAGE);
    struct uffdio_register range = {.range = {(uintptr_t)p, 16 * PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    NEED(ioctl(fd, UFFDIO_REGISTER, &range) == 0);
    NEED(munmap(p, 16 * PAGE) == 0);
    close(fd);
}

static void advise(void) {
    int all[] = {MADV_DONTNEED, MADV_DONTFORK, MADV_DOFORK, MADV_WIPEONFORK, MADV_KEEPONFORK, MADV_DONTDUMP, MADV_DODUMP, MADV_PAGEOUT};
    char *p = map(16 * PAGE);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        p[0] = 1;
        NEED(madvise(p, 16 * PAGE, all[i]) == 0);
    }
    NEED(munmap(p, 16 * PAGE) == 0);
}

static void lock(void) {
    char *p = map(PAGE);
    NEED(mlock(p, PAGE) == 0 || errno == ENOMEM || errno == EPERM || errno == EAGAIN);
    NEED(munlock(p, PAGE) == 0 || errno == ENOMEM);
    NEED(munmap(p, PAGE) == 0);
}

static void merge(void) {
    NEED(prctl(PR_SET_DUMPABLE, 1) == 0);
    (void)prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
}

static void *ends(void *arg) { return arg; }
static void make_thread(void) {
    pthread_t thread;
    int failed = pthread_create(&thread, NULL, ends, NULL);
    NEED(failed ? failed == EAGAIN : !pthread_join(thread, NULL));
}

static void spawn(void) {
    pid_t pid;
    char *argv[] = {"true", NULL};
    NEED(posix_spawn(&pid, "/bin/true", NULL, NULL, argv, environ) == 0 && wait_for(pid) == 0);
}

static void share_by_vfork(void) {
    pid_t pid = vfork();
    if (pid == 0) _exit(0);
    NEED(wait_for(pid) == 0);
}

/* Execution fails, after the limits of the program were given to the kernel and taken back. */
static void execute(void) {
    char *argv[] = {"/", NULL};
    NEED(execv("/", argv) == -1 && errno == EACCES);
}

static void handle_signals(void) {
    struct sigaction action = {.sa_handler = SIG_IGN};
    NEED(sigaction(SIGUSR1, &action, NULL) == 0);
    action.sa_handler = SIG_DFL;
    NEED(sigaction(SIGUSR1, &action, NULL) == 0);
}

/* memfold warns of calls that it refuses. */
static void be_warned(void) { NEED(syscall(SYS_io_setup, 1, NULL) == -1); }

static void touch_folded(void) {
    static __thread uint64_t random;
    random = mix(random + (uintptr_t)&random);
    size_t at = random % (LEN / PAGE) * PAGE;
    check_from(memory + at, PAGE, 1, at / PAGE);
}

/* The kernel reads folded memory. */
static void pass_folded(void) {
    static __thread uint64_t random;
    random = mix(random + (uintptr_t)&random);
    int fd = open("/dev/null", O_WRONLY);
    NEED(fd >= 0 && write(fd, memory + random % (LEN / PAGE - 64) * PAGE, 64 * PAGE) == (ssize_t)(64 * PAGE));
    close(fd);
}

static void (*const ALL[])(void) = {
    map_and_unmap, move, set_limits, register_faults, advise, lock, merge, make_thread, spawn, share_by_vfork,
    execute, handle_signals, be_warned, touch_folded, pass_folded,
};
enum { CALLS = sizeof ALL / sizeof *ALL };
static volatile unsigned long made[CALLS];

static void *repeat(void *arg) {
    size_t which = (uintptr_t)arg;
    while (!stop) ALL[which](), made[which]++;
    return NULL;
}

/* Records the number of each call, so that the one that hangs is known. */
static void be_child(int *at) {
    for (int i = 0; i < CALLS; i++) *at = i, ALL[i]();
    _exit(5);
}

static void need_ended(pid_t pid, const int *at) {
    int status;
    time_t end = time(NULL) + CHILD_SECONDS;
    pid_t ended;
    while (!(ended = waitpid(pid, &status, WNOHANG)) && time(NULL) < end) usleep(1000);
    if (ended != pid || !WIFEXITED(status) || WEXITSTATUS(status) != 5) {
        fprintf(stderr, "a child %s in call %d, status %x\n", ended ? "failed" : "hangs", *at, ended ? status : 0);
        kill(pid, SIGKILL);
        fail("each child makes all calls", __FILE__, __LINE__);
    }
}

/* Forks while two threads repeat each pair of neighbouring calls in turn, and then all at once. */
static void fork_amid_calls(int forks) {
    struct rlimit limit;
    int all[] = {RLIMIT_AS, RLIMIT_NOFILE};
    rlim_t low[] = {64ul << 40, 512};
    for (int i = 0; i < 2; i++) {
        NEED(getrlimit(all[i], &limit) == 0);
        limit.rlim_cur = low[i];
        NEED(setrlimit(all[i], &limit) == 0);
    }
    memory = map(LEN);
    fill(memory, LEN, 1);
    push_out(memory, LEN);
    int *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(at != MAP_FAILED);
    pthread_t thread[CALLS];
    for (long first = 0; first <= CALLS; first += 3) {
        long end = first == CALLS ? CALLS : first + 3, from = first == CALLS ? 0 : first;
        stop = 0;
        for (long i = from; i < end; i++) NEED(!pthread_create(&thread[i], NULL, repeat, (void *)i));
        for (int n = 0; n < forks / (CALLS / 3 + 1); n++) {
            pid_t pid = fork();
            NEED(pid >= 0);
            if (pid == 0) be_child(at);
            need_ended(pid, at);
        }
        stop = 1;
        for (long i = from; i < end; i++) NEED(!pthread_join(thread[i], NULL) && made[i] > 0);
    }
    check(memory, LEN, 1);
}
static void forks(void) { fork_amid_calls(FORKS); }
static void few_forks(void) { fork_amid_calls(FEW_FORKS); }

static void *execute_always(void *arg) {
    while (!stop) execute();
    return arg;
}

/* While a thread tries to execute a program, the kernel ignores the signals that the program
 * ignores. A child made meanwhile touches new memory all the same. */
static void ignored(void) {
    pthread_t thread;
    struct sigaction action = {.sa_handler = SIG_IGN};
    memory = map_folded(LEN, 1);
    NEED(sigaction(SIGBUS, &action, NULL) == 0);
    int *at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(at != MAP_FAILED && !pthread_create(&thread, NULL, execute_always, NULL));
    for (int n = 0; n < FORKS; n++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            map_and_unmap();
            _exit(5);
        }
        need_ended(pid, at);
    }
    stop = 1;
    NEED(!pthread_join(thread, NULL));
}

int main(int argc, char **argv) {
    static const struct test tests[] = {{"forks", forks}, {"few_forks", few_forks}, {"ignored", ignored}};
    return RUN_NAMED(argc, argv, tests);
}
