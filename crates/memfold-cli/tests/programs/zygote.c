// A program that goes on only while it has one thread, as it is seen in /proc; with "folds", when its memory is folded.
#include "common.h"
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

static void count(int threads) {
    struct stat by_name, by_file, at;
    struct statx extended;
    int proc = open("/proc", O_RDONLY | O_DIRECTORY), file = open("/proc/self/task", O_RDONLY);
    NEED(!stat("/proc/self/task/", &by_name) && !fstat(file, &by_file) && !fstatat(proc, "self/task/", &at, 0));
    NEED(!statx(AT_FDCWD, "/proc/thread-self/..", 0, STATX_BASIC_STATS, &extended));
    nlink_t expected = 2 + threads;
    if (by_name.st_nlink != expected || by_file.st_nlink != expected || at.st_nlink != expected || extended.stx_nlink != expected)
        fprintf(stderr, "%lu %lu %lu %u, not %lu\n", by_name.st_nlink, by_file.st_nlink, at.st_nlink, extended.stx_nlink, expected), _exit(90);
    close(proc);
    close(file);
}

static void *wait_there(void *memory) {
    pthread_barrier_t *barrier = memory;
    pthread_barrier_wait(barrier);
    pthread_barrier_wait(barrier);
    return NULL;
}

/* A sandbox makes namespaces after it has given up rights, and is folded later. */
static void namespaces(void) {
    NEED(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    for (int i = 0; i < 20; i++) {
        count(1);
        int made = unshare(CLONE_NEWUSER);
        NEED(!made || errno == EPERM || errno == ENOSPC || errno == EUSERS);
        if (made) break;
    }
    char *memory = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < 64 * MIB; at += PAGE) memory[at] = at / PAGE % 251;
    for (int i = 0; i < 2; i++) {
        pid_t pid = i ? 0 : fork();
        for (size_t at = 0; at < 64 * MIB; at += PAGE) NEED(memory[at] == (char)(at / PAGE % 251));
        if (!i && !pid) _exit(0);
        int status;
        if (!i) NEED(waitpid(pid, &status, 0) == pid && !status);
    }
    puts("right");
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "namespaces")) return namespaces(), 0;
    int folds = argc > 1 && !strcmp(argv[1], "folds");
    size_t len = folds ? 64 * MIB : 16 * MIB;
    char *memory = malloc(len);
    for (size_t at = 0; at < len; at += PAGE) memory[at] = at / PAGE % 251;
    /* Often enough for the sites to be rewritten. */
    for (int i = 0; i < 50; i++) count(1);
    if (folds) {
        pthread_barrier_t barrier;
        pthread_t thread;
        pthread_barrier_init(&barrier, NULL, 2);
        NEED(!pthread_create(&thread, NULL, wait_there, &barrier));
        pthread_barrier_wait(&barrier);
        count(2);
        pthread_barrier_wait(&barrier);
        pthread_join(thread, NULL);
    } else {
        /* A sandbox of its own: the kernel gives it to who has one thread. */
        long made = unshare(CLONE_NEWUSER);
        NEED(!made || errno == EPERM || errno == ENOSPC);
    }
    for (size_t at = 0; at < len; at += PAGE) NEED(memory[at] == (char)(at / PAGE % 251));
    puts("right");
    return 0;
}
