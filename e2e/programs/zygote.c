// A program that continues only while /proc shows one thread. With "folds", also when its memory is
// folded.
#include "common.h"
#include <dirent.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
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
    int listed = 0;
    DIR *list = opendir("/proc/self/task");
    for (struct dirent *each; (each = readdir(list));) listed += each->d_name[0] != '.';
    closedir(list);
    /* With a buffer for one entry. */
    char entry[32], text[4096];
    int small = 0, by_small = open("/proc/self/task", O_RDONLY | O_DIRECTORY);
    for (long got; (got = syscall(SYS_getdents64, by_small, entry, sizeof entry)); small += entry[19] != '.') NEED(got > 0);
    close(by_small);
    NEED(listed == threads && small == threads);
    for (int is_stat = 0; is_stat < 2; is_stat++) {
        int about = open(is_stat ? "/proc/self/stat" : "/proc/thread-self/status", O_RDONLY);
        ssize_t len = 0;
        for (ssize_t got; (got = read(about, text + len, sizeof text - 1 - len)); len += got) NEED(got > 0);
        text[len] = 0;
        close(about);
        char *at = is_stat ? strrchr(text, ')') : strstr(text, "\nThreads:\t");
        NEED(at && text[len - 1] == '\n' && strlen(text) == (size_t)len);
        for (int field = is_stat ? 18 : 0; field; field--) at = strchr(at, ' ') + 1;
        int told = atoi(is_stat ? at : at + 10);
        if (told != threads) fprintf(stderr, "%d in %s, not %d\n", told, text, threads), _exit(91);
    }
}

static void *wait_there(void *memory) {
    pthread_barrier_t *barrier = memory;
    pthread_barrier_wait(barrier);
    pthread_barrier_wait(barrier);
    return NULL;
}

/* A sandbox makes namespaces after it has given up privileges, and is folded later. */
static void namespaces(void) {
    NEED(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    pid_t before = vfork();
    if (!before) _exit(0);
    NEED(waitpid(before, NULL, 0) == before);
    for (int i = 0; i < 20; i++) {
        count(1);
        int made = unshare(CLONE_NEWUSER);
        NEED(!made || errno == EPERM || errno == ENOSPC || errno == EUSERS);
        if (made) break;
    }
    char *memory = mmap(NULL, 64 * UNIT, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < 64 * UNIT; at += PAGE) memory[at] = at / PAGE % 251;
    for (int i = 0; i < 2; i++) {
        pid_t pid = i ? 0 : fork();
        for (size_t at = 0; at < 64 * UNIT; at += PAGE) NEED(memory[at] == (char)(at / PAGE % 251));
        if (!i && !pid) _exit(0);
        int status;
        if (!i) NEED(waitpid(pid, &status, 0) == pid && !status);
    }
    puts("right");
}

/* Counts the threads of this process that have a filter, as another program sees them. */
static int filtered(int *all) {
    char command[128];
    int count = 0;
    snprintf(command, sizeof command, "cat /proc/%d/task/*/status", getpid());
    FILE *output = popen(command, "r");
    for (char line[1024]; fgets(line, sizeof line, output); *all += !strncmp(line, "Seccomp:", 8)) count += !strcmp(line, "Seccomp:\t2\n");
    NEED(!pclose(output));
    return count;
}

/* Calls that the kernel allows only in a process of one thread, with all memory folded. */
static void alone(char *memory, size_t len) {
    pid_t child = fork();
    if (!child) {
        close(11);
        char byte = unshare(CLONE_NEWUSER) ? 'n' : 'y';
        NEED(write(9, &byte, 1) == 1 && read(10, &byte, 1) >= 0);
        _exit(0);
    }
    char made, path[64];
    NEED(read(8, &made, 1) == 1);
    snprintf(path, sizeof path, "/proc/%d/ns/user", child);
    int space = open(path, O_RDONLY);
    for (int i = 0; made == 'y' && i < 2; i++) {
        /* The child enters the namespace of another process, and this process enters its own. */
        pid_t copy = i ? 0 : fork();
        for (size_t at = 0; at < len; at += PAGE) NEED(memory[at] == (char)(at / PAGE % 251)), memory[at] += 0;
        if (!copy) NEED(i ? !unshare(CLONE_NEWUSER) : !setns(space, CLONE_NEWUSER));
        count(1);
        if (!i && !copy) _exit(0);
        int status;
        if (!i) NEED(waitpid(copy, &status, 0) == copy && !status);
    }
    NEED(unshare(CLONE_NEWUSER << 1 | CLONE_THREAD | 1) == -1 && errno == EINVAL);
    close(11);
    NEED(waitpid(child, NULL, 0) == child);
    struct sock_filter all = {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW};
    struct sock_fprog program = {1, &all};
    int threads = 0;
    NEED(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    NEED(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program));
    NEED(filtered(&threads) == 1);
    if (threads == 1) fprintf(stderr, "no engine threads\n"), _exit(92);
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "namespaces")) return namespaces(), 0;
    int folds = argc > 1 && !strcmp(argv[1], "folds");
    size_t len = folds ? 64 * UNIT : 16 * MIB;
    char *memory = malloc(len);
    for (size_t at = 0; at < len; at += PAGE) memory[at] = at / PAGE % 251;
    /* Enough calls for the sites to be rewritten. */
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
        int there[2], back[2];
        NEED(!pipe(there) && !pipe(back));
        NEED(dup2(there[0], 8) == 8 && dup2(there[1], 9) == 9 && dup2(back[0], 10) == 10 && dup2(back[1], 11) == 11);
        NEED(!fcntl(11, F_SETFD, FD_CLOEXEC));
        close(back[1]);
        alone(memory, len);
    } else {
        /* The kernel makes a user namespace only for a process of one thread. */
        long made = unshare(CLONE_NEWUSER);
        NEED(!made || errno == EPERM || errno == ENOSPC);
    }
    for (size_t at = 0; at < len; at += PAGE) NEED(memory[at] == (char)(at / PAGE % 251));
    puts("right");
    return 0;
}
