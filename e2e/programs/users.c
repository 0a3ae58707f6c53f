/* Processes that give up privileges. Their writes can't harm the run's other processes, and the
 * engine continues with the privileges that are left. */
#include "common.h"
#include <dirent.h>
#include <grp.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#define LEN (48 * UNIT)
#define SMALL (8 * MIB)
#define NOBODY 65534

static char *folded(void) {
    char *memory = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(memory != MAP_FAILED);
    fill(memory, LEN, 1);
    return memory;
}

static void become_nobody(void) { NEED(setgroups(0, NULL) == 0 && setgid(NOBODY) == 0 && setuid(NOBODY) == 0); }

/* Counts the threads of a process, the engine's included, and checks that all run as one user.
 * `first` gets a number that identifies them. Another process must call it, because a process's
 * own engine threads are hidden from it. */
static int threads_of(pid_t pid, unsigned user, int *first) {
    char path[300], line[300];
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *all = opendir(path);
    NEED(all);
    int count = 0;
    *first = 0;
    for (struct dirent *one; (one = readdir(all));) {
        if (*one->d_name == '.') continue;
        snprintf(path, sizeof path, "/proc/%d/task/%s/status", pid, one->d_name);
        FILE *file = fopen(path, "r");
        NEED(file);
        while (fgets(line, sizeof line, file)) {
            unsigned real, effective, saved, of_files;
            if (sscanf(line, "Uid: %u %u %u %u", &real, &effective, &saved, &of_files) == 4)
                NEED(real == user && effective == user && saved == user && of_files == user);
            unsigned long long permitted;
            if (user && sscanf(line, "CapPrm: %llx", &permitted) == 1) NEED(permitted == 0);
        }
        fclose(file);
        *first += atoi(one->d_name) * ++count;
    }
    closedir(all);
    return count;
}

/* A child inspects this process's threads. Returns the number that identifies them, which must
 * be `same` if that is given. */
static int seen(unsigned user, int least, int *same) {
    int to[2];
    NEED(pipe(to) == 0);
    pid_t parent = getpid(), pid = fork();
    NEED(pid >= 0);
    if (!pid) {
        int which;
        NEED(threads_of(parent, user, &which) >= least);
        NEED(write(to[1], &which, sizeof which) == sizeof which);
        _exit(0);
    }
    int which, status = wait_for(pid);
    NEED(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    NEED(read(to[0], &which, sizeof which) == sizeof which);
    if (same) NEED(*same == which);
    close(to[0]), close(to[1]);
    return which;
}

/* Overwrites all memory that memfold shares with other processes. */
static void spoil(unsigned char with, int *tables) {
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    NEED(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char access[8];
        if (!strstr(line, "memfd:memfold-") || sscanf(line, "%lx-%lx %7s", &start, &end, access) != 3) continue;
        NEED(strchr(access, 's'));
        if (access[1] != 'w') {
            NEED(mprotect((void *)start, end - start, PROT_READ | PROT_WRITE) == -1 && errno == EACCES);
            continue;
        }
        ++*tables;
        for (char *at = (char *)start; at < (char *)end; at += 64) memset(at, with, 64);
    }
    fclose(maps);
}

/* A child that has become nobody, by itself or by executing this program, overwrites what it
 * can. */
static void spoils(void) {
    char *memory = folded();
    unsigned char all[] = {0xff, 0, 0x7f, 1};
    for (size_t n = 0; n < 2 * sizeof all; n++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (!pid) {
            check(memory, UNIT, 1);
            become_nobody();
            char with[8];
            snprintf(with, sizeof with, "%d", all[n / 2]);
            if (n % 2) execl("/proc/self/exe", "users", "spoil", with, NULL);
            int tables = 0;
            spoil(all[n / 2], &tables);
            NEED(tables > 0);
            usleep(200000);
            _exit(7);
        }
        int status;
        while (waitpid(pid, &status, WNOHANG) == 0) check(memory, LEN, 1);
        /* A child that has overwritten its own engine's figures may end by that. */
        NEED(WIFSIGNALED(status) || WEXITSTATUS(status) < 98 || WEXITSTATUS(status) > 99);
    }
    check(memory, LEN, 1);
}

static volatile int stop;
static char *shared;

static void *reads(void *seed) {
    for (uint64_t n = (uint64_t)seed; !stop; n = mix(n)) check_from(shared + n % (LEN / PAGE) * PAGE, PAGE, 1, n % (LEN / PAGE));
    return NULL;
}

/* setuid changes all threads of libc. The engine's threads follow with the first. */
static void while_others_read(void) {
    pthread_t all[8];
    shared = folded();
    for (long n = 0; n < 8; n++) NEED(pthread_create(&all[n], NULL, reads, (void *)(n + 1)) == 0);
    seen(0, 8 + 2, NULL);
    become_nobody();
    seen(NOBODY, 8 + 2, NULL);
    usleep(100000);
    stop = 1;
    for (int n = 0; n < 8; n++) NEED(pthread_join(all[n], NULL) == 0);
    char *more = folded();
    check(shared, LEN, 1), check(more, LEN, 1);
}

/* A reversible change leaves the engine as it is. */
static void for_a_while(void) {
    char *memory = folded();
    int same = seen(0, 2, NULL);
    for (int n = 0; n < 300; n++) {
        NEED(setegid(NOBODY) == 0 && seteuid(NOBODY) == 0);
        check_from(memory + n * APART % LEN, PAGE, 1, n * APART % LEN / PAGE);
        NEED(seteuid(0) == 0 && setegid(0) == 0);
    }
    NEED(setresuid(NOBODY, NOBODY, 0) == 0 && setresuid(0, 0, 0) == 0);
    seen(0, 2, &same);
    check(memory, LEN, 1);
}

/* A child of vfork has its parent's memory, and its own privileges. */
static void in_a_child_of_vfork(void) {
    char *memory = folded();
    pid_t pid = vfork();
    if (!pid) {
        if (syscall(SYS_setresuid, NOBODY, NOBODY, NOBODY)) _exit(1);
        execl("/bin/sh", "sh", "-c", "exit 5", NULL);
        _exit(2);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 5);
    seen(0, 2, NULL);
    become_nobody();
    seen(NOBODY, 2, NULL);
    spawn_and_system();
    check(memory, LEN, 1);
}

/* The new user may have no further process. */
static void without_a_process_to_spare(void) {
    char *memory = folded();
    struct rlimit none = {0, 0}, after;
    NEED(setrlimit(RLIMIT_NPROC, &none) == 0 && setuid(NOBODY) == 0);
    NEED(getrlimit(RLIMIT_NPROC, &after) == 0 && after.rlim_cur == 0 && after.rlim_max == 0);
    NEED(fork() == -1 && errno == EAGAIN);
    check(memory, LEN, 1);
    char *more = folded();
    check(more, LEN, 1), check(memory, LEN, 1);
}

static void *becomes(void *user) {
    long id = (long)user;
    NEED(syscall(SYS_setresuid, id, id, id) == 0);
    check(shared, UNIT, 1);
    return NULL;
}

/* Threads with different privileges. The engine's threads can't have all of them. */
static void threads_differ(void) {
    pthread_t all[8];
    shared = folded();
    for (long n = 0; n < 8; n++) NEED(pthread_create(&all[n], NULL, becomes, (void *)(3000 + n)) == 0);
    for (int n = 0; n < 8; n++) NEED(pthread_join(all[n], NULL) == 0);
    char *more = folded();
    check(shared, LEN, 1), check(more, LEN, 1);
}

static void set_capabilities(unsigned which) {
    struct { unsigned version; int pid; } head = {0x20080522, 0};
    unsigned words[6] = {which, which};
    NEED(syscall(SYS_capset, &head, words) == 0);
}

/* Capabilities that stay after a change of user, and are dropped step by step. */
static void keeps_capabilities(void) {
    char *memory = folded();
    NEED(prctl(PR_SET_KEEPCAPS, 1) == 0 && setgid(1000) == 0 && setuid(1000) == 0);
    set_capabilities(1 << 6 | 1 << 7 | 1 << 21);
    check(memory, LEN, 1);
    NEED(setuid(1001) == 0);
    set_capabilities(0);
    seen(1001, 2, NULL);
    check(memory, LEN, 1);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"spoils", spoils}, {"threads", while_others_read}, {"while", for_a_while}, {"vfork", in_a_child_of_vfork},
        {"processes", without_a_process_to_spare},
        {"differ", threads_differ},
        {"keeps", keeps_capabilities},
    };
    if (argc == 3 && !strcmp(argv[1], "spoil")) {
        /* The process has an engine by then. */
        char *memory = map(SMALL);
        fill(memory, SMALL, 1);
        check(memory, SMALL, 1);
        int tables = 0;
        spoil(atoi(argv[2]), &tables);
        NEED(tables > 0);
        usleep(200000);
        return 7;
    }
    return RUN_NAMED(argc, argv, all);
}
