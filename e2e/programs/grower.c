/* grower SEED MIB: maps so much in ways that the seed chooses, and rests after each mapping. Then
   many threads fill all of it at once, so they run before any other thread does. */
#include "common.h"

#define THREADS 16
#define PARTS_MAX 4096

static char *part[PARTS_MAX];
static size_t bytes[PARTS_MAX], count;
static pthread_barrier_t all_ready;

static void *plain(size_t len, int access) {
    void *at = mmap(NULL, len, access, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(at != MAP_FAILED);
    return at;
}

/* Adds a part of `len` bytes, mapped in one of six ways. */
static void grow(unsigned way, size_t len) {
    char *at;
    if (way == 0) {
        at = plain(len, PROT_READ | PROT_WRITE);
    } else if (way == 1) {
        at = plain(len, PROT_NONE);
        NEED(mprotect(at, len, PROT_READ | PROT_WRITE) == 0);
    } else if (way == 2) {
        at = plain(len, PROT_NONE);
        NEED(mmap(at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
    } else if (way == 3) {
        at = mremap(plain(PAGE, PROT_READ | PROT_WRITE), PAGE, len, MREMAP_MAYMOVE);
        NEED(at != MAP_FAILED);
    } else if (way == 4) {
        at = sbrk(len);
        NEED(at != (void *)-1);
    } else {
        NEED(at = calloc(1, len));
    }
    NEED(count < PARTS_MAX);
    part[count] = at + (-(uintptr_t)at % 16), bytes[count++] = len - 16;
}

static void *fill_parts(void *first) {
    pthread_barrier_wait(&all_ready);
    for (size_t i = (size_t)first; i < count; i += THREADS)
        for (size_t at = 0; at + 8 <= bytes[i]; at += PAGE) *(uint64_t *)(part[i] + at) = mix(i * 7919 + at);
    return NULL;
}

int main(int argc, char **argv) {
    NEED(argc == 3);
    uint64_t seed = strtoul(argv[1], NULL, 10), chosen = seed;
    size_t left = strtoul(argv[2], NULL, 10) * MIB;
    const struct timespec rest = {0, 1000000};
    while (left > 0) {
        chosen = mix(chosen + 1);
        /* 128 KiB to 4 MiB. */
        size_t len = ((size_t)128 << 10) << (chosen >> 8) % 6;
        if (len > left) len = left;
        grow(chosen % 6, len);
        left -= len;
        nanosleep(&rest, NULL);
    }
    pthread_t thread[THREADS];
    pthread_barrier_init(&all_ready, NULL, THREADS);
    for (size_t i = 0; i < THREADS; i++) NEED(pthread_create(&thread[i], NULL, fill_parts, (void *)i) == 0);
    for (size_t i = 0; i < THREADS; i++) pthread_join(thread[i], NULL);
    for (size_t i = 0; i < count; i++)
        for (size_t at = 0; at + 8 <= bytes[i]; at += PAGE) NEED(*(uint64_t *)(part[i] + at) == mix(i * 7919 + at));
    print_peak();
    puts("right");
    return 0;
}
