/* A library to preload. Its constructor starts a thread, which keeps a little data, checks and
 * replaces it for ever, and gives memory back. At the end of the process it checks and gives back
 * what it has not touched for long. All signals are blocked in it, as in jemalloc's. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BLOCKS = 128, BYTES = 200 << 10, COLD_FROM = 50, COLD = 8 << 20 };

static volatile int over;
static pthread_t thread;
static pid_t process;

static void check(const unsigned char *block, size_t len, int byte) {
    for (size_t at = 0; at < len; at += 64)
        if (block[at] != (unsigned char)byte) {
            static const char text[] = "the thread of the library found a wrong byte\n";
            if (write(2, text, sizeof text - 1)) _exit(99);
        }
}

static unsigned char *map(size_t len) {
    void *at = mmap(0, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return at == MAP_FAILED ? abort(), NULL : at;
}

static void give_back(unsigned char *memory, size_t len) {
    if (madvise(memory, len, MADV_DONTNEED)) abort();
    check(memory, len, 0);
}

static void *work(void *arg) {
    unsigned char *blocks[BLOCKS] = {0}, *hot = map(BYTES), *cold = NULL;
    for (size_t turn = 0; !over; turn++) {
        unsigned char **block = &blocks[turn * 31 % BLOCKS];
        if (*block) check(*block, BYTES, turn - BLOCKS);
        free(*block);
        if (!(*block = malloc(BYTES))) abort();
        memset(*block, turn, BYTES);
        check(hot, BYTES, turn ? turn - 1 : 0);
        give_back(hot, BYTES);
        memset(hot, turn, BYTES);
        if (turn == COLD_FROM) memset(cold = map(COLD), 7, COLD);
        usleep(2000);
    }
    if (!cold) return arg;
    give_back(cold, COLD / 2);
    check(cold + COLD / 2, COLD / 2, 7);
    return arg;
}

__attribute__((constructor)) static void begin(void) {
    sigset_t all, before;
    process = getpid();
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, 0, work, 0)) abort();
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

__attribute__((destructor)) static void end(void) {
    over = 1;
    if (process == getpid()) pthread_join(thread, 0);
}
