/* Children of vfork are killed while they make a call. Their parent continues, and its new
 * memory is folded. Each kind of call is a test. A test whose name ends with ":long" has more of
 * them. */
#include "bare.h"
#include <linux/userfaultfd.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>

#define LEN (48 * MIB)
#define OTHER (1 * UNIT)

static volatile pid_t victim;
static volatile int over;
static char *memory, *other;
static int file, segment, is_long, few;

static void *kill_children(void *unused) {
    for (uint64_t turn = 1; !over; turn++) {
        pid_t pid = victim;
        if (!pid) continue;
        for (volatile unsigned i = 0; i < mix(turn) % 60000; i++) {}
        kill(pid, SIGKILL);
        victim = 0;
    }
    return unused;
}

/* Makes children that repeat `work` until they are killed. The parent makes changes between
 * them. */
static void with_children(void (*work)(unsigned)) {
    pthread_t killer;
    over = 0;
    NEED(!pthread_create(&killer, NULL, kill_children, NULL));
    for (volatile int i = 0; i < (is_long ? 3000 : 120) / (few ? few : 1); i++) {
        pid_t pid = vfork();
        if (!pid) {
            victim = syscall(SYS_getpid);
            for (unsigned k = 0; k < 3000; k++) work(k);
            _exit(0);
        }
        int status = wait_for(pid);
        NEED(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
        victim = 0;
        /* These calls take the engine's locks. */
        char *p = map(UNIT);
        p[0] = 1;
        NEED(!(madvise)(p, UNIT, MADV_DONTNEED) && !p[0] && !munmap(p, UNIT));
        if (memory)
            for (uint64_t k = 0, at = i; k < 8; k++) at = mix(at), check_from(memory + at % (LEN / PAGE) * PAGE, PAGE, 10, at % (LEN / PAGE));
    }
    over = 1;
    NEED(!pthread_join(killer, NULL));
}

/* Runs `work` in children that are killed. Old and new memory is folded. */
static void killed_in(void (*work)(unsigned)) {
    memory = map(LEN);
    other = map(OTHER);
    memset(other, 5, OTHER);
    fill(memory, LEN, 10);
    push_out(memory, LEN);
    with_children(work);
    check(memory, LEN, 10);
    char *later = map(LEN);
    fill(later, LEN, 11);
    push_out(later, LEN);
    check(later, LEN, 11);
}

static void advise(unsigned k) {
    static const int all[] = {MADV_DONTNEED, MADV_FREE, MADV_DONTFORK, MADV_DOFORK, MADV_WILLNEED, MADV_REMOVE, MADV_POPULATE_WRITE};
    if (k % 7 == 0) other[k * PAGE % OTHER] = 1;
    (madvise)(other, OTHER, all[k % 7]);
}
static void advice(void) { killed_in(advise); }

static int quiet[2];
static void *waits(void *unused) {
    NEED(read(quiet[0], other + 4 * PAGE, 8 * PAGE) == 1);
    return unused;
}
/* Overwrites memory that a call of another thread holds with zeros. */
static void discard_held(unsigned k) {
    other[5 * PAGE] = k;
    (madvise)(other, OTHER, MADV_DONTNEED);
}
static void held(void) {
    pthread_t reader;
    other = map(OTHER);
    NEED(!pipe(quiet) && !pthread_create(&reader, NULL, waits, NULL));
    killed_in(discard_held);
    NEED(write(quiet[1], "x", 1) == 1 && !pthread_join(reader, NULL));
}

static void lock(unsigned k) {
    if (k % 2) (munlock)(other, OTHER / 4);
    else (mlock)(other, OTHER / 4);
}
static void locks(void) {
    killed_in(lock);
    NEED(!(munlock)(other, OTHER));
}

static void map_file(unsigned k) {
    if (k % 2) (map_at)(other, 64 << 10, MAP_FIXED);
    else mmap(other, 64 << 10, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0);
    char *elsewhere = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, file, 0);
    if (elsewhere != MAP_FAILED) munmap(elsewhere, PAGE);
}
static void files(void) {
    NEED((file = open("/proc/self/exe", O_RDONLY)) >= 0);
    killed_in(map_file);
}

static void attach(unsigned k) {
    if (k % 2) (map_at)(other, 64 << 10, MAP_FIXED);
    else shmat(segment, other, SHM_REMAP);
    void *elsewhere = shmat(segment, NULL, 0);
    if (elsewhere != (void *)-1) shmdt(elsewhere);
}
static void segments(void) {
    NEED((segment = shmget(IPC_PRIVATE, 64 << 10, 0600)) >= 0);
    killed_in(attach);
    NEED(!shmctl(segment, IPC_RMID, NULL));
}

static void protect(unsigned k) {
    syscall(SYS_pkey_mprotect, other, OTHER / 2, k % 2 ? PROT_READ | PROT_WRITE : PROT_READ, -1);
    syscall(SYS_prctl, 67, 0, 0, 0, 0);
}
static void protects(void) { killed_in(protect); }

/* Executes programs that can't be executed, and one that can. */
static void try_to_execute(unsigned k) {
    static char *const argv[] = {"true", NULL};
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    execve("/proc/self/nothing", argv, environ);
    execve("/dev/null", argv, environ);
    if (k == 40) execve("/bin/true", argv, environ);
}
static void executes(void) {
    struct rlimit limit = {512, 512};
    NEED(!setrlimit(RLIMIT_NOFILE, &limit));
    killed_in(try_to_execute);
}

static int uffd;
static void give(unsigned k) {
    struct uffdio_register range = {.range = {(uintptr_t)other, 64 << 10}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    if (k % 2) (ioctl)(uffd, UFFDIO_UNREGISTER, &range.range);
    else (ioctl)(uffd, UFFDIO_REGISTER, &range);
}
static void gives(void) {
    struct uffdio_api api = {.api = UFFD_API};
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    NEED(uffd >= 0 && !(ioctl)(uffd, UFFDIO_API, &api));
    killed_in(give);
}

/* Maps memory before anything is managed, with an engine and without one. */
static void map_some(unsigned k) {
    char *p = mmap(NULL, 64 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (void)k;
    if (p != MAP_FAILED) (madvise)(p, 64 << 10, MADV_DONTNEED), munmap(p, 64 << 10);
}
static void early(void) {
    map(5 * MIB);
    with_children(map_some);
    killed_in(map_some);
}
static void map_much(unsigned k) {
    char *p = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    (void)k;
    if (p != MAP_FAILED) munmap(p, 8 * MIB);
}
static void earlier(void) {
    with_children(map_much);
    killed_in(map_much);
}

/* Children that are traced, as by a debugger. */
static void be_traced(unsigned k) {
    if (k == 0) ptrace(PTRACE_TRACEME, 0, 0, 0);
    map_some(k);
}
static void traced(void) {
    few = 30; /* Each child loads all memory. */
    killed_in(be_traced);
}

static void copy(unsigned k) {
    if (k == 3) _exit(0);
    if (!syscall(SYS_fork)) syscall(SYS_exit_group, 0);
}
static void copies(void) {
    few = 4;
    killed_in(copy);
}

/* Children that end by themselves with a robust lock, which the kernel then marks. */
static void end_with_lock(unsigned k) {
    static struct {
        void *next;
        long offset;
        void *pending;
        struct { void *next; uint32_t word; } one;
    } list;
    (void)k;
    list.next = &list.one, list.one.next = &list.next;
    list.offset = (char *)&list.one.word - (char *)&list.one;
    syscall(SYS_set_robust_list, &list, 3 * sizeof(void *));
    list.one.word = syscall(SYS_gettid);
    _exit(0);
}
static void robust(void) { killed_in(end_with_lock); }

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"advice", advice}, {"held", held}, {"locks", locks}, {"files", files}, {"segments", segments}, {"protects", protects},
        {"executes", executes}, {"gives", gives}, {"early", early}, {"earlier", earlier}, {"traced", traced}, {"copies", copies},
        {"robust", robust},
    };
    is_long = argc > 1 && strstr(argv[1], ":long");
    return RUN_NAMED(argc, argv, all);
}
