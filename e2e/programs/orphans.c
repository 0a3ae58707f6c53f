/* Children of vfork whose parent's process ends before they do. */
#include "common.h"
#include <sys/prctl.h>

enum { ROUNDS = 10, CALLS = 200, LONGEST = 240 };
static const size_t LEN = 40 * UNIT;
static char *memory;
static pid_t first;
/* Shared with all processes. */
static struct { volatile int begun, orphaned; } *shared;

static void too_long(int signal) {
    (void)signal;
    (void)!write(2, "FAILED: a child still runs\n", 27);
    kill(0, SIGKILL);
}

/* Starts a process group, so that everything can be killed, and adopts all descendants. */
static void begin(void) {
    first = getpid();
    NEED(setpgid(0, 0) == 0 || errno == EPERM);
    NEED(prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED && signal(SIGALRM, too_long) != SIG_ERR);
    alarm(LONGEST);
}

static void change_mappings(int touches) {
    char *p = mmap(NULL, 16 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) _exit(90);
    if (touches) p[PAGE] = 1;
    if (munmap(p, 16 * PAGE) != 0) _exit(91);
}

static int is_orphan(void) { return getppid() == first; }

/* What a child does, and the status with which it ends. Memory that it maps as an orphan is its
 * own; other memory is also its parent's. */
static void maps_until_orphaned(int touches) {
    while (!is_orphan()) change_mappings(touches);
    shared->orphaned = 1;
    for (int i = 0; i < CALLS; i++) change_mappings(1);
    _exit(7);
}
static void maps(void) { maps_until_orphaned(0); }
static void touches(void) { maps_until_orphaned(1); }
static void waits(void) {
    while (!is_orphan()) usleep(100);
    shared->orphaned = 1;
}
static void maps_later(void) {
    waits();
    maps();
}
static void executes(void) {
    waits();
    execl("/bin/sh", "sh", "-c", "exit 7", NULL);
    _exit(92);
}
static void reads(void) {
    waits();
    check(memory, LEN, 1);
    fill(memory, LEN, 2);
    check(memory, LEN, 2);
    pid_t pid = fork();
    if (pid < 0) _exit(93);
    if (pid == 0) {
        check(memory, LEN, 2);
        _exit(0);
    }
    if (wait_for(pid) != 0) _exit(94);
    _exit(7);
}
static void stays(void) {
    for (shared->orphaned = 1;;) change_mappings(0);
}

static void (*child)(void);
static void *make_child(void *arg) {
    pid_t pid = vfork();
    if (pid == 0) {
        shared->begun = 1;
        child();
    }
    return arg;
}

/* Makes a process with folded memory and a child by vfork, and ends it while the child runs. Calls
 * `after` then. Returns the status of the child. */
static int orphan(void (*what)(void), int by_exit, void (*after)(pid_t)) {
    shared->begun = shared->orphaned = 0;
    child = what;
    pid_t parent = fork();
    NEED(parent >= 0);
    if (parent == 0) {
        memory = map_folded(LEN, 1);
        pthread_t thread;
        NEED(!pthread_create(&thread, NULL, make_child, NULL));
        while (!shared->begun) usleep(1000);
        usleep(20000);
        if (by_exit) _exit(6);
        kill(getpid(), SIGKILL);
    }
    int status = wait_for(parent);
    NEED(by_exit ? status == 6 << 8 : status == SIGKILL);
    if (after) after(0);
    pid_t pid = wait(&status);
    NEED(pid > 0);
    return status;
}

static void each_ends(void (*what)(void)) {
    begin();
    for (int i = 0; i < ROUNDS; i++) {
        int status = orphan(what, i % 2, NULL);
        if (status != 7 << 8) {
            fprintf(stderr, "round %d: status %x\n", i, status);
            fail("the child ends as it would plainly", __FILE__, __LINE__);
        }
    }
}
static void mapping(void) { each_ends(maps); }
static void mapping_later(void) { each_ends(maps_later); }
static void executing(void) { each_ends(executes); }

/* A child that needs its parent's memory finds it right, or ends with memfold's status. It ends if
 * a thread of its parent was changing the memory at that moment. */
static void goes_on_or_ends(void (*what)(void)) {
    begin();
    int right = 0;
    for (int i = 0; i < ROUNDS; i++) {
        int status = orphan(what, i % 2, NULL);
        NEED(status == 7 << 8 || status == 125 << 8);
        right += status == 7 << 8;
    }
    fprintf(stderr, "%d of %d children went on\n", right, ROUNDS);
    NEED(right > 0);
}
static void reading(void) { goes_on_or_ends(reads); }
static void touching(void) { goes_on_or_ends(touches); }

static void terminate(pid_t unused) {
    (void)unused;
    while (!shared->orphaned) usleep(1000);
    /* To the group, but not to this process. */
    NEED(signal(SIGTERM, SIG_IGN) != SIG_ERR && kill(0, SIGTERM) == 0);
}
static void terminated(void) {
    begin();
    for (int i = 0; i < ROUNDS; i++) {
        NEED(signal(SIGTERM, SIG_DFL) != SIG_ERR);
        NEED(orphan(stays, i % 2, terminate) == SIGTERM);
    }
}

static void *spawn_always(void *arg) {
    for (;;) spawn_and_system();
    return arg;
}

/* A process ends while its threads start programs. Everything that it has started ends too. */
static void spawning(void) {
    begin();
    for (int i = 0; i < ROUNDS; i++) {
        pid_t parent = fork();
        NEED(parent >= 0);
        if (parent == 0) {
            memory = map_folded(LEN, 1);
            pthread_t thread;
            for (int n = 0; n < 4; n++) NEED(!pthread_create(&thread, NULL, spawn_always, NULL));
            usleep(50000 + i * 3000);
            if (i % 2) _exit(6);
            kill(getpid(), SIGKILL);
        }
        int status = wait_for(parent);
        NEED(status == (i % 2 ? 6 << 8 : SIGKILL));
        while (wait(&status) > 0) {}
        NEED(errno == ECHILD);
    }
}

int main(int argc, char **argv) {
    static const struct test tests[] = {
        {"mapping", mapping}, {"mapping-later", mapping_later}, {"executing", executing},
        {"reading", reading}, {"touching", touching}, {"terminated", terminated}, {"spawning", spawning},
    };
    return RUN_NAMED(argc, argv, tests);
}
