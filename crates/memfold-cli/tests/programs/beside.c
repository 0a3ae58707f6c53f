/* A library to preload. Its constructor starts a thread, which keeps a little data, checks and
 * replaces it for ever, and gives memory back. All signals are blocked in it, as in jemalloc's. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BLOCKS = 128, BYTES = 200 << 10 };

static void check(const unsigned char *block, size_t len, int byte) {
    for (size_t at = 0; at < len; at += 64)
        if (block[at] != (unsigned char)byte) {
            static const char text[] = "the thread of the library found a wrong byte\n";
            if (write(2, text, sizeof text - 1)) _exit(99);
        }
}

static void *work(void *arg) {
    unsigned char *blocks[BLOCKS] = {0}, *map = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t turn = 0;; turn++) {
        unsigned char **block = &blocks[turn * 31 % BLOCKS];
        if (*block) check(*block, BYTES, turn - BLOCKS);
        free(*block);
        if (!(*block = malloc(BYTES))) abort();
        memset(*block, turn, BYTES);
        check(map, BYTES, turn ? turn - 1 : 0);
        if (madvise(map, BYTES, MADV_DONTNEED)) abort();
        check(map, BYTES, 0);
        memset(map, turn, BYTES);
        usleep(500);
    }
    return arg;
}

__attribute__((constructor)) static void begin(void) {
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, 0, work, 0)) abort();
    pthread_sigmask(SIG_SETMASK, &before, 0);
}
