/* A library starts a thread in its constructor, and the program has the thread work on folded memory.
 * With -DLIBRARY this is the library. If DEAF is set, the thread blocks the signals of libc too. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { DISCARD, READ, BLOCK, TOUCH };
struct job {
    int what, file;
    char *at;
    size_t len;
    long result;
};
extern int jobs[2], answers[2];

#ifdef LIBRARY
int jobs[2], answers[2];

static void *serve(void *arg) {
    struct job *job;
    unsigned long every = -1;
    if (getenv("DEAF")) syscall(SYS_rt_sigprocmask, SIG_SETMASK, &every, 0, 8);
    if (write(answers[1], "x", 1) != 1) abort();
    while (read(jobs[0], &job, sizeof job) == sizeof job) {
        sigset_t all;
        switch (job->what) {
        case DISCARD:
            job->result = madvise(job->at, job->len, MADV_DONTNEED);
            break;
        case READ:
            job->result = read(job->file, job->at, job->len);
            break;
        case BLOCK:
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, 0);
            /* fall through */
        case TOUCH:
            job->result = 0;
            for (size_t at = 0; at < job->len; at += 4096) job->result += job->at[at];
        }
        if (write(answers[1], "x", 1) != 1) abort();
    }
    return arg;
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    char ready;
    if (pipe(jobs) || pipe(answers) || pthread_create(&thread, 0, serve, 0)) abort();
    if (read(answers[0], &ready, 1) != 1) abort();
}
#else
#define LEN (64ul << 20)

static char value(size_t at) { return 1 + at / 4096 % 100; }

int main(int argc, char **argv) {
    static const char *names[] = {"discard", "read", "block", "touch"};
    char *memory = mmap(0, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), answer;
    for (size_t at = 0; at < LEN; at += 64) memset(memory + at, value(at), 64);
    struct job job = {.at = memory, .len = LEN / 2, .file = open("/proc/self/exe", O_RDONLY)}, *its = &job;
    while (argc < 2 || strcmp(names[job.what], argv[1])) job.what++;
    if (job.what == READ) job.len = 8192;
    if (write(jobs[1], &its, sizeof its) != sizeof its || read(answers[0], &answer, 1) != 1) return 3;
    long sum = 0, old = 0;
    for (size_t at = 0; at < LEN / 2; at += 4096) sum += memory[at], old += memory[at] == value(at);
    if (job.what == DISCARD && (job.result || sum)) return printf("%ld, %ld pages with old data\n", job.result, old), 1;
    if (job.what == READ && (job.result != 8192 || memcmp(memory, "\177ELF", 4))) return printf("read %ld\n", job.result), 1;
    if (job.what >= BLOCK && (job.result != sum || old != LEN / 2 / 4096)) return puts("wrong sum"), 1;
    for (size_t at = LEN / 2; at < LEN; at += 64)
        if (memory[at] != value(at)) return puts("wrong byte"), 1;
    return puts("right"), 0;
}
#endif
