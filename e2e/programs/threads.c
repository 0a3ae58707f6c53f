/* Threads touch, discard, unmap and map memory at once, each its own. Threads start and end. */
#include "common.h"
#include <sys/utsname.h>

#define THREADS 8
#define SLOT (10 * UNIT)
#define PAGES (SLOT / PAGE)
static char *base;
static volatile int stop;
static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;
static int ops = 15; /* A bit for each kind of change to make. */

/* Each page of a slot is a version of the pattern. Version 0 is zeros. */
static void *work(void *arg) {
    uint64_t me = (uintptr_t)arg, random = me + 99;
    char *slot = base + me * SLOT;
    uint32_t version[PAGES] = {0};
    for (int step = 0; step < 700; step++) {
        random = mix(random);
        size_t page = random % PAGES, many = 1 + (random >> 20) % 24;
        if (page + many > PAGES) many = PAGES - page;
        char *at = slot + page * PAGE;
        unsigned what = (random >> 40) % 16;
        if (what < 4 && !(ops >> what & 1)) what = 9;
        switch (what) {
        case 0:
            NEED(madvise(at, many * PAGE, MADV_DONTNEED) == 0);
            memset(version + page, 0, many * 4);
            break;
        case 1:
            NEED(munmap(at, many * PAGE) == 0);
            NEED(mmap(at, many * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == at);
            memset(version + page, 0, many * 4);
            break;
        case 2:
            NEED(mmap(at, many * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at);
            memset(version + page, 0, many * 4);
            break;
        case 3: {
            /* Moves the memory away and back. */
            if (ops & 16) pthread_mutex_lock(&one);
            char *away = mremap(at, many * PAGE, many * PAGE, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
            if (away == MAP_FAILED) { /* It consists of several areas by now. */
                if (ops & 16) pthread_mutex_unlock(&one);
                break;
            }
            check_zero(at, many * PAGE);
            NEED(mremap(away, many * PAGE, many * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) == at);
            if (ops & 16) pthread_mutex_unlock(&one);
            break;
        }
        case 4: case 5: case 6: case 7: case 8:
            for (size_t p = page; p < page + many; p++) {
                version[p] = step + 1;
                fill_from(slot + p * PAGE, PAGE, me * 100000 + version[p], p);
            }
            break;
        default:
            for (size_t p = page; p < page + many; p++)
                if (version[p]) check_from(slot + p * PAGE, PAGE, me * 100000 + version[p], p);
                else check_zero(slot + p * PAGE, PAGE);
        }
    }
    for (size_t p = 0; p < PAGES; p++)
        if (version[p]) check_from(slot + p * PAGE, PAGE, me * 100000 + version[p], p);
        else check_zero(slot + p * PAGE, PAGE);
    return NULL;
}

static void slots(void) {
    base = map(THREADS * SLOT);
    pthread_t thread[THREADS];
    for (long i = 0; i < THREADS; i++) {
        fill(base + i * SLOT, SLOT, 1);
        memset(base + i * SLOT, 0, SLOT);
    }
    for (long i = 0; i < THREADS; i++) NEED(!pthread_create(&thread[i], NULL, work, (void *)i));
    for (int i = 0; i < THREADS; i++) NEED(!pthread_join(thread[i], NULL));
}

static void *brief(void *arg) {
    char local[16 * PAGE];
    uint64_t me = (uintptr_t)arg;
    memset(local, (int)me, sizeof local);
    char *own = malloc(4 * PAGE);
    fill(own, 4 * PAGE, me);
    size_t page = mix(me) % (SLOT / PAGE);
    check_from(base + page * PAGE, PAGE, 5, page);
    check(own, 4 * PAGE, me);
    free(own);
    for (size_t i = 0; i < sizeof local; i++) NEED(local[i] == (char)me);
    return NULL;
}

static void *churn_memory(void *arg) {
    char *p = map(40 * UNIT);
    for (uint64_t i = 0; !stop; i++) fill(p, 40 * UNIT, i), check(p, 40 * UNIT, i);
    return arg;
}

static void churn(void) {
    base = map(SLOT);
    fill(base, SLOT, 5);
    pthread_t other, thread[8];
    NEED(!pthread_create(&other, NULL, churn_memory, NULL));
    for (long round = 0; round < 250; round++) {
        for (long i = 0; i < 8; i++) NEED(!pthread_create(&thread[i], NULL, brief, (void *)(round * 8 + i)));
        for (int i = 0; i < 8; i++) NEED(!pthread_join(thread[i], NULL));
    }
    stop = 1;
    NEED(!pthread_join(other, NULL));
    check(base, SLOT, 5);
}

/* All threads read and write the same memory. */
static pthread_mutex_t lock[64];
static uint32_t seen[64];
static void *share(void *arg) {
    uint64_t random = (uintptr_t)arg;
    for (int step = 0; step < 400; step++) {
        random = mix(random);
        size_t i = random % 64;
        char *at = base + i * UNIT;
        pthread_mutex_lock(&lock[i]);
        if (random >> 60) check(at + (random >> 8) % 128 * PAGE, 0, 0), check(at, UNIT, i * 10000 + seen[i]);
        else fill(at, UNIT, i * 10000 + ++seen[i]);
        pthread_mutex_unlock(&lock[i]);
    }
    return NULL;
}

static void shared(void) {
    base = map(64 * UNIT);
    pthread_t thread[THREADS];
    for (int i = 0; i < 64; i++) pthread_mutex_init(&lock[i], NULL), fill(base + i * UNIT, UNIT, i * 10000);
    for (long i = 0; i < THREADS; i++) NEED(!pthread_create(&thread[i], NULL, share, (void *)(i + 1)));
    for (int i = 0; i < THREADS; i++) NEED(!pthread_join(thread[i], NULL));
    for (int i = 0; i < 64; i++) check(base + i * UNIT, UNIT, i * 10000 + seen[i]);
}

static void *end_last(void *at) {
    usleep(50000);
    check(at, 32 * UNIT, 3);
    syscall(SYS_exit, 9);
    return NULL;
}
/* A process ends with its last thread, and with that thread's status. Before Linux 6.0, with the
 * status of its first thread. */
static void ends(void) {
    struct utsname kernel;
    NEED(uname(&kernel) == 0);
    int of_last = atoi(kernel.release) >= 6 ? 9 : 5;
    char *at = map(32 * UNIT);
    fill(at, 32 * UNIT, 3);
    push_out(at, 32 * UNIT);
    for (int first = 0; first < 2; first++) {
        pid_t pid = fork();
        if (!pid) {
            pthread_t thread[THREADS];
            for (int i = 0; i < (first ? THREADS : 0); i++) NEED(!pthread_create(&thread[i], NULL, end_last, at));
            syscall(SYS_exit, 5);
        }
        int status;
        NEED(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == (first ? of_last : 5));
    }
    check(at, 32 * UNIT, 3);
}

int main(int argc, char **argv) {
    NEED(argc >= 2);
    if (argc > 2) ops = atoi(argv[2]);
    if (is(argv[1], "slots")) slots();
    else if (is(argv[1], "churn")) churn();
    else if (is(argv[1], "shared")) shared();
    else if (is(argv[1], "ends")) ends();
    else return 2;
    puts("right");
}
