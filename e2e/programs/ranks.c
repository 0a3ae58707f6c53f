/* Processes that read and write each other's folded memory, as the ranks of an MPI program do. */
#include "common.h"
#include <sched.h>

#define RANKS 4
/* Bytes of a rank: the first half has a pattern that stays, the second half is written by others. */
static size_t LEN = 32 * UNIT;
#define HALF (LEN / 2)

/* Shared by all ranks. */
static struct {
    pthread_barrier_t all;
    volatile pid_t pids[RANKS];
    char *volatile at[RANKS];
    volatile unsigned long calls[RANKS];
    volatile int stop;
} *shared;
static int ranks, rank;
static char *mine, *buffer;
static uint64_t state;

static uint64_t random_below(uint64_t n) { return (state = mix(state + rank)) % n; }
static void meet(void) { pthread_barrier_wait(&shared->all); }

/* The byte at `offset` of the pattern `seed`. */
static unsigned char byte(uint64_t seed, size_t offset) {
    return word(page_key(seed, offset / PAGE), offset % PAGE / 8) >> offset % 8 * 8;
}

static void fill_bytes(char *to, size_t len, uint64_t seed, size_t offset) {
    for (size_t i = 0; i < len; i++) to[i] = byte(seed, offset + i);
}

static void check_bytes(const char *at, size_t len, uint64_t seed, size_t offset) {
    for (size_t i = 0; i < len; i++)
        if ((unsigned char)at[i] != byte(seed, offset + i)) {
            fprintf(stderr, "WRONG: rank %d seed %lu offset %zu + %zu of %zu: %x\n", rank, (unsigned long)seed, offset, i, len, at[i]);
            exit(98);
        }
}

/* Cuts `[at, at + len)` into at most `most` parts. */
static int parts_of(struct iovec *parts, int most, char *at, size_t len) {
    int n = 0;
    while (len) {
        size_t some = n + 1 < most ? 1 + random_below(len / 3 + 1) : len;
        parts[n++] = (struct iovec){at, some};
        at += some, len -= some;
    }
    return n;
}

/* Transfers between `buffer` and the memory of a rank. */
static ssize_t transfer(int writes, int other, size_t offset, size_t len, int parts) {
    struct iovec local[64], remote[64];
    int count = parts_of(local, parts, buffer, len), remote_count = parts_of(remote, parts, shared->at[other] + offset, len);
    return (writes ? process_vm_writev : process_vm_readv)(shared->pids[other], local, count, remote, remote_count, 0);
}

static const size_t sizes[] = {1, 7, 100, 4096, 5000, 65536, 70001, MIB, MIB + 4095, 3 * MIB + 17};

static void read_from(int other) {
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t len = sizes[i] < HALF ? sizes[i] : HALF, offset = random_below(HALF - len + 1);
        int parts = i % 2 ? 50 : 1;
        NEED(transfer(0, other, offset, len, parts) == (ssize_t)len);
        check_bytes(buffer, len, other, offset);
        shared->calls[rank]++;
    }
}

/* Writes a pattern to the second half of a rank, which only this rank does. */
static void write_to(int other, uint64_t seed) {
    for (size_t done = 0, i = 0; done < HALF; i++) {
        size_t len = sizes[i % 10] + random_below(1000);
        if (len > HALF - done) len = HALF - done;
        fill_bytes(buffer, len, seed, done);
        NEED(transfer(1, other, HALF + done, len, i % 2 ? 50 : 1) == (ssize_t)len);
        done += len;
        shared->calls[rank]++;
    }
}

/* Without memfold, nothing is folded, and the program must find the same. */
static void fold(void) {
    if (getenv("MEMFOLD_RUN")) page_out(mine, LEN, LEN / PAGE / 4);
}

static void begin_rank(int number) {
    rank = number, state = number;
    mine = map(LEN), buffer = map(HALF);
    fill(mine, HALF, rank);
    fill(mine + HALF, HALF, 100 + rank);
    shared->pids[rank] = getpid();
    shared->at[rank] = mine;
    fold();
}

/* Runs `what` in so many ranks, and waits until all have ended. */
static void run_ranks(int count, void (*what)(void)) {
    pthread_barrierattr_t attributes;
    ranks = count;
    shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED && !pthread_barrierattr_init(&attributes));
    NEED(!pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED) && !pthread_barrier_init(&shared->all, &attributes, count));
    pid_t pids[RANKS];
    for (int n = 0; n < count; n++)
        if (!(pids[n] = fork())) {
            begin_rank(n);
            meet();
            what();
            meet();
            exit(0);
        }
    for (int n = 0; n < count; n++) {
        int status;
        pid_t ended = wait(&status);
        NEED(ended > 0);
        if (!status) continue;
        /* The others would wait for it. */
        for (int other = 0; other < count; other++) kill(pids[other], SIGKILL);
        fprintf(stderr, "FAILED: process %d ended with %x\n", ended, status);
        exit(97);
    }
}

static void exchanges(void) {
    for (int round = 0; round < 3; round++) {
        int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
        /* All read from all at once. */
        for (int n = 1; n < ranks; n++) read_from((rank + n) % ranks);
        write_to(next, 1000 + 10 * round + rank);
        meet();
        check_bytes(mine + HALF, HALF, 1000 + 10 * round + before, 0);
        check(mine, HALF, rank);
        fold();
        meet();
    }
}
static void two(void) { run_ranks(2, exchanges); }
static void four(void) { LEN /= 2, run_ranks(4, exchanges); }

/* A rank in a PID namespace of its own has another number for `memfold run`. */
static void inside(void) {
    NEED(unshare(CLONE_NEWPID) == 0);
    pid_t first = fork();
    if (!first) {
        run_ranks(2, exchanges);
        exit(0);
    }
    NEED(wait_for(first) == 0);
}

static void *exchange(void *other) {
    char *to = map(MIB);
    for (size_t i = 0; i < 12; i++) {
        size_t offset = i * 700001 % (HALF - MIB);
        struct iovec local = {to, MIB}, remote = {shared->at[(long)other] + offset, MIB};
        NEED(process_vm_readv(shared->pids[(long)other], &local, 1, &remote, 1, 0) == (ssize_t)MIB);
        check_bytes(to, MIB, (long)other, offset);
    }
    return NULL;
}

/* More threads than a process lends to at a time. */
static void in_threads(void) {
    pthread_t threads[12];
    for (int n = 0; n < 12; n++) NEED(!pthread_create(threads + n, NULL, exchange, (void *)(long)(1 - rank)));
    for (int n = 0; n < 12; n++) NEED(!pthread_join(threads[n], NULL));
}
static void threads(void) { run_ranks(2, in_threads); }

/* Transfers end where the other memory ends, or must not be written to. */
static void ends(void) {
    size_t hole = 96 * PAGE, before = 10 * PAGE;
    if (rank == 0) {
        NEED(munmap(mine + hole, PAGE) == 0);
        NEED(mprotect(mine + HALF + hole, PAGE, PROT_READ) == 0);
        NEED(madvise(mine, hole, MADV_PAGEOUT) == 0 && madvise(mine + HALF, hole, MADV_PAGEOUT) == 0);
    }
    meet();
    if (rank == 1) {
        NEED(transfer(0, 0, hole - before + 5, 2 * before, 1) == (ssize_t)before - 5);
        check_bytes(buffer, before - 5, 0, hole - before + 5);
        errno = 0;
        NEED(transfer(0, 0, hole + 1, PAGE, 1) == -1 && errno == EFAULT);
        fill_bytes(buffer, 2 * before, 7, 0);
        NEED(transfer(1, 0, HALF + hole - before, 2 * before, 1) == (ssize_t)before);
        errno = 0;
        NEED(transfer(1, 0, HALF + hole, PAGE, 1) == -1 && errno == EFAULT);
        struct iovec local = {buffer, PAGE}, remote = {mine, PAGE}, none = {NULL, PAGE};
        errno = 0;
        NEED(process_vm_readv(shared->pids[0], &none, 1, &(struct iovec){shared->at[0], PAGE}, 1, 0) == -1 && errno == EFAULT);
        errno = 0;
        NEED(process_vm_readv(shared->pids[0], &local, 1, &remote, 1, 1) == -1 && errno == EINVAL);
        errno = 0;
        NEED(process_vm_readv(0x3fffffff, &local, 1, &remote, 1, 0) == -1 && errno == ESRCH);
        NEED(process_vm_readv(shared->pids[0], &local, 1, &remote, 0, 0) == 0);
    }
    meet();
    if (rank == 0) check_bytes(mine + HALF + hole - before, before, 7, 0);
}
static void short_transfers(void) { run_ranks(2, ends); }

static void *write_for_good(void *unused) {
    struct iovec local = {mine, MIB}, remote = {shared->at[0] + HALF, MIB};
    for (;;) process_vm_writev(shared->pids[0], &local, 1, &remote, 1, 0);
    return unused;
}

/* Victims are killed in the middle of calls, as callers and as callees. The others go on. */
static void killing(void) {
    if (rank == 0) {
        shared->pids[2] = 0;
        for (int n = 0; n < 20; n++) {
            unsigned long before = shared->calls[0] = 0;
            pid_t victim = fork();
            NEED(victim >= 0);
            if (!victim) {
                begin_rank(2);
                pthread_t writers[3];
                for (int w = 0; w < 3; w++) NEED(!pthread_create(writers + w, NULL, write_for_good, NULL));
                for (;;) read_from(0), read_from(1);
            }
            while (shared->pids[2] != victim) usleep(100);
            before = shared->calls[2];
            while (shared->calls[2] < before + 3 + n) transfer(random_below(2), 2, HALF, MIB, 1);
            NEED(kill(victim, SIGKILL) == 0);
            for (ssize_t done; (done = transfer(0, 2, 0, MIB, 1)) != -1 || errno != ESRCH;)
                if (done > 0) check_bytes(buffer, done, 2, 0);
                else NEED(errno == EFAULT || waitpid(victim, NULL, 0) == victim);
            fold();
        }
        shared->stop = 1;
    }
    while (!shared->stop) {
        read_from(0);
        /* The victim may end at any time. */
        if (shared->pids[2] && transfer(0, 2, 0, MIB, 1) == (ssize_t)MIB) shared->calls[1]++;
    }
    meet();
    read_from(1 - rank);
    check(mine, HALF, rank);
}
static void killed(void) { run_ranks(2, killing); }

/* A process that is stopped can't load its memory. A call on it must not wait for that. */
static void stopping(void) {
    if (rank == 1) {
        kill(getpid(), SIGSTOP);
    } else {
        char path[64], text[256];
        snprintf(path, sizeof path, "/proc/%d/stat", shared->pids[1]);
        do {
            int fd = open(path, O_RDONLY);
            ssize_t n = read(fd, text, sizeof text - 1);
            NEED(n > 0 && !close(fd));
            text[n] = 0;
        } while (!strstr(text, ") T "));
        ssize_t done = transfer(0, 1, 0, HALF, 1);
        NEED(done > 0 || errno == EFAULT);
        if (done > 0) check_bytes(buffer, done, 1, 0);
        NEED(kill(shared->pids[1], SIGCONT) == 0);
    }
    meet();
    read_from(1 - rank);
}
static void stopped(void) { run_ranks(2, stopping); }

/* A small process has no engine of its own. */
static void small(void) {
    LEN = 64 * UNIT;
    shared = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    pid_t large = fork();
    if (!large) {
        begin_rank(1);
        shared->stop = 1;
        for (;;) pause();
    }
    while (!shared->stop) usleep(1000);
    buffer = map(PAGE);
    for (size_t offset = 0; offset < HALF; offset += 37 * PAGE) {
        NEED(transfer(0, 1, offset + 9, PAGE - 9, 1) == (ssize_t)PAGE - 9);
        check_bytes(buffer, PAGE - 9, 1, offset + 9);
    }
    NEED(kill(large, SIGKILL) == 0);
    wait_for(large);
}

int main(int argc, char **argv) {
    const struct test all[] = {{"two", two},         {"four", four},       {"inside", inside}, {"threads", threads}, {"short", short_transfers},
                               {"killed", killed}, {"stopped", stopped}, {"small", small}};
    return RUN_NAMED(argc, argv, all);
}
