/* Threads that fault all the time are kept on one CPU: nothing that they start or ask for may show that. */
#include "common.h"
#include <sched.h>
#include <stdatomic.h>
#include <threads.h>
#include <wordexp.h>

static const size_t LEN = 64 * MIB;
static char *data;
static int all;

/* CPUs that the calling thread may run on, read without any call that memfold looks at. */
static int cpus(void) {
    char text[4096];
    int fd = open("/proc/thread-self/status", O_RDONLY);
    NEED(fd >= 0);
    ssize_t n = read(fd, text, sizeof text - 1);
    NEED(n > 0 && close(fd) == 0);
    text[n] = 0;
    const char *at = strstr(text, "\nCpus_allowed:\t");
    int count = 0;
    for (at += 15; *at != '\n'; at++)
        if (*at != ',') count += __builtin_popcount(*at <= '9' ? *at - '0' : *at - 'a' + 10);
    return count;
}

static void touch(int times) {
    static uint64_t state = 1;
    for (int i = 0; i < times; i++) {
        state = mix(state);
        ((volatile char *)data)[state % LEN]++;
    }
}

/* Faults until this thread is kept. */
static void be_kept(void) {
    for (int i = 0; i < 100000; i++) {
        touch(50);
        if (cpus() == 1) return;
    }
    fail("this thread was never kept on its CPU", __FILE__, __LINE__);
}

static void *in_thread(void *_) { return (void *)(intptr_t)cpus(); }
static int in_c11_thread(void *_) { return cpus(); }
static int in_clone(void *_) { _exit(cpus()); }
static int status_of(pid_t pid) {
    int status = wait_for(pid);
    NEED(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int by_fork(char *self) {
    pid_t pid = fork();
    if (pid == 0) _exit(cpus());
    return status_of(pid);
}
static int by_vfork(char *self) {
    pid_t pid = vfork();
    if (pid == 0) {
        execl(self, self, "cpus", NULL);
        _exit(99);
    }
    return status_of(pid);
}
static int by_spawn(char *self) {
    pid_t pid;
    char *argv[] = {self, "cpus", NULL};
    NEED(posix_spawn(&pid, self, NULL, NULL, argv, environ) == 0);
    return status_of(pid);
}
static int by_system(char *self) {
    char line[4096];
    snprintf(line, sizeof line, "%s cpus", self);
    return WEXITSTATUS(system(line));
}
static int by_popen(char *self) {
    char line[4096];
    snprintf(line, sizeof line, "%s cpus", self);
    return WEXITSTATUS(pclose(popen(line, "r")));
}
static int by_wordexp(char *self) {
    char line[4096];
    wordexp_t words;
    snprintf(line, sizeof line, "$(%s cpus; echo $?)", self);
    NEED(wordexp(line, &words, 0) == 0 && words.we_wordc == 1);
    return atoi(words.we_wordv[0]);
}
static int by_clone(char *self) {
    static char stack[1 << 16] __attribute__((aligned(16)));
    return status_of(clone(in_clone, stack + sizeof stack, SIGCHLD, NULL));
}
static int by_syscall(char *self) {
    pid_t pid = syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
    if (pid == 0) _exit(cpus());
    return status_of(pid);
}
static int by_thread(char *self) {
    pthread_t thread;
    void *found;
    NEED(pthread_create(&thread, NULL, in_thread, NULL) == 0 && pthread_join(thread, &found) == 0);
    return (int)(intptr_t)found;
}
static int by_c11_thread(char *self) {
    thrd_t thread;
    int found;
    NEED(thrd_create(&thread, in_c11_thread, NULL) == thrd_success && thrd_join(thread, &found) == thrd_success);
    return found;
}
static int asked(char *self) {
    cpu_set_t set;
    NEED(sched_getaffinity(0, sizeof set, &set) == 0);
    return CPU_COUNT(&set);
}
static int asked_of_thread(char *self) {
    cpu_set_t set;
    NEED(pthread_getaffinity_np(pthread_self(), sizeof set, &set) == 0);
    return CPU_COUNT(&set);
}
static int asked_by_syscall(char *self) {
    cpu_set_t set;
    CPU_ZERO(&set);
    NEED(syscall(SYS_sched_getaffinity, 0, sizeof set, &set) > 0);
    return CPU_COUNT(&set);
}
/* When it computes or sleeps and no longer faults, it is let go. */
static int computing(char *self) {
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 < 200);
    return cpus();
}
static int sleeping(char *self) {
    usleep(200000);
    return cpus();
}
static void never(void) {
    for (int i = 0; i < 20000; i++) {
        touch(1);
        NEED(i % 20 || cpus() == all);
    }
}

static const struct {
    const char *name;
    int (*way)(char *);
} WAYS[] = {{"fork", by_fork},     {"vfork", by_vfork},     {"spawn", by_spawn},   {"system", by_system},
            {"popen", by_popen},   {"wordexp", by_wordexp}, {"clone", by_clone},   {"syscall", by_syscall},
            {"thread", by_thread}, {"c11", by_c11_thread},  {"asked", asked},      {"asked-thread", asked_of_thread},
            {"asked-syscall", asked_by_syscall}, {"computing", computing}, {"sleeping", sleeping}};

/* Threads that wait for each other's locks are kept together, where that is faster. What one starts or asks for shows it for
   none of them. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int times_kept;
static char *self;

static void *one_of_several(void *number) {
    for (int i = (int)(intptr_t)number; times_kept < 40; i++) {
        pthread_mutex_lock(&lock);
        touch(20);
        pthread_mutex_unlock(&lock);
        if (cpus() == 1) {
            times_kept++;
            /* Not those that hold everybody up for long. */
            if (times_kept % 10 == 0) NEED(WAYS[i % (sizeof WAYS / sizeof *WAYS - 2)].way(self) == all);
        }
    }
    usleep(200000);
    NEED(cpus() == all);
    return NULL;
}
static void several(void) {
    pthread_t threads[4];
    alarm(60);
    for (intptr_t i = 0; i < 4; i++) NEED(pthread_create(&threads[i], NULL, one_of_several, (void *)i) == 0);
    for (int i = 0; i < 4; i++) NEED(pthread_join(threads[i], NULL) == 0);
}

int main(int argc, char **argv) {
    if (is(argv[1], "cpus")) return cpus();
    if (is(argv[1], "executed")) {
        NEED(cpus() == atoi(argv[2]));
        return puts("right") < 0;
    }
    all = cpus();
    data = map(LEN);
    fill(data, LEN, 1);
    self = argv[0];
    if (is(argv[1], "never")) {
        never();
    } else if (is(argv[1], "several")) {
        several();
    } else if (is(argv[1], "executed-by")) {
        char count[16];
        snprintf(count, sizeof count, "%d", all);
        be_kept();
        execl(argv[0], argv[0], "executed", count, NULL);
        NEED(0);
    } else if (is(argv[1], "set")) {
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(0, &one);
        be_kept();
        NEED(sched_setaffinity(0, sizeof one, &one) == 0);
        touch(20000);
        usleep(200000);
        NEED(cpus() == 1);
    } else if (is(argv[1], "user") || is(argv[1], "user-syscall")) {
        /* The engine's threads may not touch those of another user. */
        be_kept();
        if (geteuid() == 0 && is(argv[1], "user")) NEED(setresuid(65534, 65534, 65534) == 0);
        else if (geteuid() == 0) NEED(syscall(SYS_setresuid, 65534, 65534, 65534) == 0);
        touch(20000);
        usleep(200000);
        NEED(cpus() == all);
    } else {
        for (size_t i = 0; i < sizeof WAYS / sizeof *WAYS; i++) {
            if (!is(argv[1], "all") && !is(argv[1], WAYS[i].name)) continue;
            be_kept();
            int found = WAYS[i].way(argv[0]);
            if (found != all) fprintf(stderr, "%s: %d CPUs of %d\n", WAYS[i].name, found, all);
            NEED(found == all);
        }
    }
    return puts("right") < 0;
}
