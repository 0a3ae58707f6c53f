// Loads folded memory in functions of its own: by reads, by a system call, in a thread, in a copy of
// the process, and after execve. Prints a sum of what it has read.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES ((size_t)48 << 20)
#define PAGE 4096
#define NOINLINE __attribute__((noinline))

static char *memory;
static uint64_t sum;

NOINLINE void map_memory(void) {
    memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    for (size_t at = 0; at < BYTES; at += 64)
        snprintf(memory + at, 64, "line %zu of %zu, a text that compresses", at / 64, at % 977);
}

NOINLINE void read_by_itself(size_t from) {
    // Every third page, so that no window of pages ahead is right.
    for (size_t page = from; page < BYTES / PAGE; page += 3)
        sum += memory[page * 7 % (BYTES / PAGE) * PAGE + 5];
}

NOINLINE void write_to_pipe(void) {
    int ends[2];
    char read_back[PAGE];
    if (pipe(ends) != 0)
        abort();
    for (size_t page = 0; page < BYTES / PAGE; page += 3) {
        char *at = memory + page * 5 % (BYTES / PAGE) * PAGE;
        if (write(ends[1], at, PAGE) != PAGE || read(ends[0], read_back, PAGE) != PAGE)
            abort();
        if (memcmp(at, read_back, PAGE) != 0)
            abort();
        sum += read_back[5];
    }
}

NOINLINE void *read_in_thread(void *from) {
    read_by_itself((size_t)from);
    return NULL;
}

NOINLINE void read_in_copy(void) {
    pid_t child = fork();
    int status = 0;
    if (child == 0) {
        read_by_itself(2);
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
        abort();
}

int main(int count, char **words) {
    pthread_t thread;
    map_memory();
    read_by_itself(0);
    write_to_pipe();
    if (count > 1) {
        printf("%lu\n", (unsigned long)sum);
        return 0;
    }
    if (pthread_create(&thread, NULL, read_in_thread, (void *)1) != 0 || pthread_join(thread, NULL) != 0)
        abort();
    read_in_copy();
    printf("%lu\n", (unsigned long)sum);
    fflush(stdout);
    execl("/proc/self/exe", "executed", "again", (char *)NULL);
    abort();
}
