/* Processes that begin small, without an engine, and grow in every possible way until they get
 * one. */
#include "common.h"
#include "members.h"
#include <sched.h>

static const size_t LEN = 48 * UNIT, STEP = 64 << 10;

/* They print their PID when they have an engine. */
static void ends(void) {
    fill(map(5 * MIB), 5 * MIB, 1);
    printf("%d\n", getpid());
    fflush(stdout);
    _exit(0);
}
static void crashes(void) {
    fill(map(5 * MIB), 5 * MIB, 1);
    printf("%d\n", getpid());
    fflush(stdout);
    raise(SIGSEGV);
}

static void holds(char *at) {
    fill(at, LEN, 2);
    push_out(at, LEN);
    check(at, LEN, 2);
}

static void by_break(void) {
    char *at = (char *)(((uintptr_t)sbrk(0) + PAGE - 1) & ~(PAGE - 1));
    NEED(brk(at) == 0);
    for (size_t n = STEP; n <= LEN; n += STEP) {
        NEED(brk(at + n) == 0);
        fill_from(at + n - STEP, STEP, 2, (n - STEP) / PAGE);
    }
    push_out(at, LEN);
    check(at, LEN, 2);
}

static void by_steps(void) {
    char *at = mmap(NULL, LEN, PROT_NONE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(at != MAP_FAILED);
    for (size_t n = 0; n < LEN; n += STEP) {
        map_at(at + n, STEP, MAP_FIXED);
        fill_from(at + n, STEP, 2, n / PAGE);
    }
    push_out(at, LEN);
    check(at, LEN, 2);
}

static void by_mremap(void) {
    char *at = map(STEP);
    fill(at, STEP, 2);
    for (size_t n = STEP; n < LEN; n += STEP) {
        NEED((at = mremap(at, n, n + STEP, MREMAP_MAYMOVE)) != MAP_FAILED);
        fill_from(at + n, STEP, 2, n / PAGE);
    }
    push_out(at, LEN);
    check(at, LEN, 2);
}

/* The existing reservation becomes accessible memory. */
static void by_reservation(void) {
    char *at = mmap(NULL, 1ul << 30, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    NEED(at != MAP_FAILED && mprotect(at, LEN, PROT_READ | PROT_WRITE) == 0);
    holds(at);
}

/* A call of the first thread is in progress when the second thread makes the process grow. */
static int pipes[2];
static void *grow_and_write(void *small) {
    char *at = map(LEN);
    holds(at);
    fill(small, PAGE, 3);
    NEED(write(pipes[1], small, PAGE) == PAGE);
    check(at, LEN, 2);
    return NULL;
}
static void by_thread(void) {
    char *mine = map(2 * PAGE);
    pthread_t thread;
    NEED(pipe(pipes) == 0 && pthread_create(&thread, NULL, grow_and_write, mine + PAGE) == 0);
    NEED(read(pipes[0], mine, PAGE) == PAGE && pthread_join(thread, NULL) == 0);
    check(mine, PAGE, 3);
}

/* A process without privileges and /proc is managed too. */
static void without_rights(void) {
    char dir[] = "/tmp/memfold-small-XXXXXX";
    int go[2], ready[2];
    char byte;
    NEED(mkdtemp(dir) && pipe(go) == 0 && pipe(ready) == 0);
    pid_t pid = fork();
    if (!pid) {
        NEED(dup2(go[0], 0) == 0 && dup2(ready[1], 1) == 1);
        close(go[0]), close(go[1]), close(ready[0]), close(ready[1]);
        NEED(chroot(dir) == 0 && chdir("/") == 0 && setresuid(65534, 65534, 65534) == 0);
        _exit(hold_until_closed(map(LEN), LEN, 2));
    }
    NEED(read(ready[0], &byte, 1) == 1);
    long kib = 0;
    for (int tries = 0; tries < 500 && (!tries || kib > 24 * UNIT >> 10); tries++) {
        usleep(20000);
        kib = anonymous_kib(pid);
    }
    close(go[1]);
    int status = wait_for(pid);
    rmdir(dir);
    fprintf(stderr, "anonymous memory of the child: %ld KiB\n", kib);
    NEED(WEXITSTATUS(status) == 3 && kib > 0 && kib <= 24 * UNIT >> 10);
}

/* A child of a process without an engine has none, until it grows. */
static void by_fork(void) {
    char *before = map(UNIT);
    fill(before, UNIT, 4);
    pid_t pid = fork();
    if (!pid) {
        holds(map(LEN));
        check(before, UNIT, 4);
        _exit(7);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 7);
    holds(map(LEN));
    check(before, UNIT, 4);
}

/* A child that shares the memory makes it grow, and ends. */
static char *shared;
static int grow_shared(void *unused) {
    (void)unused;
    shared = map(LEN);
    fill(shared, LEN, 5);
    return 6;
}
static void by_shared_child(void) {
    char *stack = map(MIB);
    int pid = clone(grow_shared, stack + MIB, CLONE_VM | CLONE_VFORK | SIGCHLD, NULL);
    NEED(WEXITSTATUS(wait_for(pid)) == 6);
    spawn_and_system();
    check(shared, LEN, 5);
    holds(map(LEN));
    check(shared, LEN, 5);
}

int main(int argc, char **argv) {
    static const struct test all[] = {{"ends", ends},
                                      {"crashes", crashes},
                                      {"break", by_break},
                                      {"steps", by_steps},
                                      {"mremap", by_mremap},
                                      {"reservation", by_reservation},
                                      {"thread", by_thread},
                                      {"rights", without_rights},
                                      {"fork", by_fork},
                                      {"shared", by_shared_child}};
    return RUN_NAMED(argc, argv, all);
}
