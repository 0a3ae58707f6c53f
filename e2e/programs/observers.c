/* Accesses to a folded program's memory from outside, and waits in it: another process, a
 * debugger, futexes. */
#include "common.h"
#include <sys/stat.h>
#include <sched.h>
#include <linux/futex.h>
#include <sys/ptrace.h>

static const size_t LEN = 40 * UNIT;

/* A child visits the folded memory at `p` in its parent. The parent waits in a pipe until
 * `there` bytes of it are resident. */
static void beside_child(char *p, size_t there, void (*visit)(pid_t parent, char *p)) {
    fill(p, LEN, 1);
    push_out(p, LEN);
    int go[2];
    NEED(pipe(go) == 0);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        pid_t parent = getppid();
        char byte;
        NEED(read(go[0], &byte, 1) == 1);
        visit(parent, p);
        check(p, LEN, 1);
        _exit(0);
    }
    push_out(p, LEN);
    check(p, there, 1);
    NEED(write(go[1], "g", 1) == 1);
    int status;
    NEED(waitpid(pid, &status, 0) == pid && status == 0);
}

static void visit_pages(pid_t parent, char *p) {
    char *mine = malloc(PAGE);
    for (size_t at = 0; at < LEN; at += PAGE) {
        struct iovec to = {mine, PAGE}, from = {p + at, PAGE};
        ssize_t got = process_vm_readv(parent, &to, 1, &from, 1, 0);
        NEED(got == (ssize_t)PAGE);
        check_from(mine, PAGE, 1, at / PAGE);
        fill_from(mine, PAGE, 1, at / PAGE);
        NEED(process_vm_writev(parent, &to, 1, &from, 1, 0) == (ssize_t)PAGE);
    }
}

/* Another process of the run reads and writes each page, folded or not. */
static void other_process(void) {
    char *p = map(LEN);
    beside_child(p, UNIT, visit_pages);
    check(p, LEN, 1);
}

/* Reads as a debugger does: every thread of the program is stopped, so no page can be loaded.
 * Resident memory can be read. Reads of folded memory fail, and it is right when the program
 * continues. */
static void debugger(void) {
    char *p = map(LEN);
    fill(p, LEN, 3);
    push_out(p, LEN);
    int ready[2];
    NEED(pipe(ready) == 0);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        push_out(p, LEN);
        check(p, UNIT, 3);
        NEED(write(ready[1], "r", 1) == 1);
        for (int i = 0; i < 40; i++) {
            usleep(5000);
            check_from(p + i * UNIT, PAGE, 3, i * UNIT / PAGE);
        }
        check(p, LEN, 3);
        _exit(0);
    }
    char byte;
    NEED(read(ready[0], &byte, 1) == 1);
    NEED(ptrace(PTRACE_SEIZE, pid, 0, 0) == 0);
    NEED(ptrace(PTRACE_INTERRUPT, pid, 0, 0) == 0);
    int status;
    NEED(waitpid(pid, &status, __WALL) == pid && WIFSTOPPED(status));
    size_t there = 0, refused = 0;
    for (size_t at = 0; at < LEN; at += PAGE) {
        errno = 0;
        uint64_t got = ptrace(PTRACE_PEEKDATA, pid, p + at + 8, 0);
        if (errno) refused++;
        else {
            NEED(got == word(page_key(3, at / PAGE), 1));
            there++;
        }
    }
    fprintf(stderr, "PEEKDATA: %zu pages there, %zu refused\n", there, refused);
    NEED(there > 0 && refused > 0);
    NEED(ptrace(PTRACE_DETACH, pid, 0, 0) == 0);
    NEED(waitpid(pid, &status, 0) == pid && status == 0);
    check(p, LEN, 3);
}

struct shared {
    pthread_mutex_t mutex, robust;
    pthread_cond_t changed;
    uint64_t turns;
    uint32_t word;
};
static struct shared *at;

static void *partner(void *arg) {
    (void)arg;
    for (int i = 0; i < 60; i++) {
        NEED(pthread_mutex_lock(&at->mutex) == 0);
        while (at->turns % 2 == 0) NEED(pthread_cond_wait(&at->changed, &at->mutex) == 0);
        at->turns++;
        NEED(pthread_cond_signal(&at->changed) == 0);
        NEED(pthread_mutex_unlock(&at->mutex) == 0);
    }
    /* Waits on the folded word until it changes. */
    while (__atomic_load_n(&at->word, __ATOMIC_SEQ_CST) == 0) syscall(SYS_futex, &at->word, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    NEED(pthread_mutex_lock(&at->robust) == 0);
    return NULL;
}

/* Locks, condition variables and futex words in memory that is folded while threads sleep on
 * them. */
static void futexes(void) {
    char *p = map(LEN);
    fill(p, LEN, 4);
    at = (struct shared *)(p + 17 * UNIT);
    memset(at, 0, PAGE);
    NEED(pthread_mutex_init(&at->mutex, NULL) == 0 && pthread_cond_init(&at->changed, NULL) == 0);
    pthread_mutexattr_t attr;
    NEED(pthread_mutexattr_init(&attr) == 0 && pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST) == 0);
    NEED(pthread_mutex_init(&at->robust, &attr) == 0);
    pthread_t thread;
    NEED(pthread_create(&thread, NULL, partner, NULL) == 0);
    for (int i = 0; i < 60; i++) {
        if (i % 6 == 0) push_out(p, LEN);
        NEED(pthread_mutex_lock(&at->mutex) == 0);
        while (at->turns % 2 == 1) NEED(pthread_cond_wait(&at->changed, &at->mutex) == 0);
        at->turns++;
        NEED(pthread_cond_signal(&at->changed) == 0);
        NEED(pthread_mutex_unlock(&at->mutex) == 0);
    }
    /* From here on, only the kernel and the partner's next access touch the page. */
    push_out(p, LEN);
    push_out(p, LEN);
    usleep(20000);
    __atomic_store_n(&at->word, 1, __ATOMIC_SEQ_CST);
    push_out(p, LEN);
    /* A private futex is identified by its address, so the wake finds the sleeper even if the
     * page is folded. */
    syscall(SYS_futex, &at->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    NEED(pthread_join(thread, NULL) == 0);
    NEED(at->turns == 120);
    /* The partner died with the robust lock. The kernel has marked the lock, folded or not. */
    push_out(p, LEN);
    NEED(pthread_mutex_lock(&at->robust) == EOWNERDEAD);
    NEED(pthread_mutex_consistent(&at->robust) == 0 && pthread_mutex_unlock(&at->robust) == 0);
    check(p, 17 * UNIT, 4);
    check_from(p + 17 * UNIT + PAGE, LEN - 17 * UNIT - PAGE, 4, 17 * UNIT / PAGE + 1);
}

/* The program and its engine are stopped and continued, as by job control. */
static void stopped(void) {
    char *p = map(LEN);
    fill(p, LEN, 5);
    push_out(p, LEN);
    pid_t own = getpid(), pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        for (int i = 0; i < 20; i++) {
            usleep(20000);
            NEED(kill(own, SIGSTOP) == 0);
            usleep(5000);
            NEED(kill(own, SIGCONT) == 0);
        }
        _exit(0);
    }
    int status;
    pid_t done;
    while ((done = waitpid(pid, &status, WNOHANG)) == 0) check(p, LEN, 5);
    NEED(done == pid && status == 0);
    check(p, LEN, 5);
}

/* Writes to the program's own memory through /proc/self/mem, past its protection, as some
 * compilers do. */
static void own_memory(void) {
    size_t len = 48 * UNIT;
    char *p = map_folded(len, 61), *copy = map(len);
    int file = open("/proc/self/mem", O_RDWR);
    NEED(file >= 0);
    NEED(pread(file, copy, len, (off_t)p) == (ssize_t)len);
    check(copy, len, 61);
    push_out(p, len);
    /* Calls that begin in memory that is not folded. */
    check(p, PAGE, 61);
    NEED(lseek(file, (off_t)p + 5, SEEK_SET) == (off_t)p + 5);
    NEED(read(file, copy + 5, len - 5) == (ssize_t)len - 5);
    NEED(lseek(file, 0, SEEK_CUR) == (off_t)(p + len));
    check(copy, len, 61);
    /* Memory that is read-only for the program. */
    NEED(mprotect(p + 8 * UNIT, 8 * UNIT, PROT_READ) == 0);
    fill(copy, len, 62);
    push_out(p, len);
    NEED(pwrite(file, copy, len - PAGE, (off_t)p) == (ssize_t)(len - PAGE));
    check(p, len - PAGE, 62);
    check_from(p + len - PAGE, PAGE, 61, len / PAGE - 1);
    push_out(p, len);
    fill(p, PAGE, 62);
    NEED(lseek(file, (off_t)p, SEEK_SET) == (off_t)p && write(file, copy, UNIT) == UNIT);
    NEED(lseek(file, 0, SEEK_CUR) == (off_t)p + (off_t)UNIT);
    check(p, len - PAGE, 62);
    /* A read and a write end before unmapped memory. */
    NEED(munmap(p + 24 * UNIT, PAGE) == 0);
    NEED(pread(file, copy, len, (off_t)p) == 24 * UNIT);
    NEED(pread(file, copy, PAGE, (off_t)p + 24 * UNIT) == -1 && errno == EIO);
    check(copy, 24 * UNIT, 62);
    close(file);
}

static int number_after(const char *text, const char *name) {
    const char *at = strstr(text, name);
    NEED(at);
    return atoi(at + strlen(name));
}

/* Reads its memory and counts its threads by descriptors, where no path leads to /proc. */
static void in_an_empty_root(void) {
    size_t len = 48 * UNIT;
    char *p = map_folded(len, 61), *copy = map(UNIT), directory[] = "/tmp/memfold-root-XXXXXX", text[4096];
    int proc = open("/proc", O_RDONLY | O_DIRECTORY), file = open("/proc/self/mem", O_RDWR);
    NEED(proc >= 0 && file >= 0 && mkdtemp(directory) && !chdir(directory) && !rmdir(directory));
    NEED(!chroot(".") || (!unshare(CLONE_NEWUSER) && !chroot(".")));
    NEED(access("/proc", F_OK) == -1);
    int by_thread = openat(proc, "thread-self/mem", O_RDONLY);
    for (size_t at = 0; at < len; at += UNIT) {
        int by = at / UNIT % 2 ? file : by_thread;
        NEED(pread(by, copy, UNIT, (off_t)(p + at)) == (ssize_t)UNIT);
        check_from(copy, UNIT, 61, at / PAGE);
    }
    fill_from(copy, UNIT, 62, 0);
    NEED(pwrite(file, copy, UNIT, (off_t)p) == (ssize_t)UNIT);
    check(p, UNIT, 62);
    check_from(p + UNIT, len - UNIT, 61, UNIT / PAGE);
    struct stat status;
    int list = openat(proc, "self/task", O_RDONLY | O_DIRECTORY), listed = 0;
    NEED(!fstatat(proc, "self/task/", &status, 0) && status.st_nlink == 3);
    NEED(list >= 0 && !fstat(list, &status) && status.st_nlink == 3);
    NEED(!fstatat(list, "", &status, AT_EMPTY_PATH) && status.st_nlink == 3);
    long got = syscall(SYS_getdents64, list, text, sizeof text);
    for (long at = 0; at < got; at += *(unsigned short *)(text + at + 16)) listed++;
    NEED(listed == 3);
    int about = openat(proc, "self/status", O_RDONLY);
    ssize_t read_bytes = read(about, text, sizeof text - 1);
    NEED(read_bytes > 0);
    text[read_bytes] = 0;
    NEED(number_after(text, "\nThreads:\t") == 1);
}

/* The child of an outer /proc has other numbers there. */
static void by_an_outer_proc(void) {
    char *p = map_folded(8 * UNIT, 61);
    NEED(!unshare(CLONE_NEWUSER | CLONE_NEWPID));
    pid_t child = fork();
    NEED(child >= 0);
    if (!child) {
        char text[4096];
        int list = open("/proc/self/task", O_RDONLY | O_DIRECTORY), about = open("/proc/self/status", O_RDONLY), listed = 0;
        struct stat status;
        check(p, 8 * UNIT, 61);
        NEED(getpid() == 1 && !fstat(list, &status) && status.st_nlink == 3);
        long got = syscall(SYS_getdents64, list, text, sizeof text);
        for (long at = 0; at < got; at += *(unsigned short *)(text + at + 16)) listed++;
        NEED(listed == 3);
        ssize_t read_bytes = read(about, text, sizeof text - 1);
        NEED(read_bytes > 0);
        text[read_bytes] = 0;
        NEED(number_after(text, "\nThreads:\t") == 1);
        _exit(7);
    }
    NEED(wait_for(child) == 7 << 8);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"own_memory", own_memory}, {"in_an_empty_root", in_an_empty_root}, {"by_an_outer_proc", by_an_outer_proc},
        {"other_process", other_process}, {"debugger", debugger}, {"futexes", futexes}, {"stopped", stopped},
    };
    return RUN_NAMED(argc, argv, all);
}
