/* shared_calls COUNT MIB ROUNDS: the threads of COUNT children, and of their parent, write to MIB that all of them share, and
 * let system calls write to it, some of which wait long. At the end all bytes are checked. */
#include "common.h"

enum { SECTOR = 512, THREADS = 4, MOST = 24 };
static char *memory;
static size_t len;
static int file, rounds, first_kind;

/* Fills sectors from `first` on with the contents that `kind` says. */
static void put_sectors(char *at, size_t first, size_t count, uint64_t kind) {
    uint64_t *word = (uint64_t *)at;
    for (size_t s = first; s < first + count; s++)
        for (unsigned w = 0; w < SECTOR / 8; w++) *word++ = w < 16 ? mix((kind << 40 | s * 64) + w) : kind << 40 | s;
}

/* The part of memory of one thread, which nobody else uses. Kinds: 0 as at the start, 1 from the file, 2 from a socket, 3
 * written, 4 as inherited while the parent was changing it. */
struct part {
    size_t first, sectors;
    uint64_t seed;
    unsigned char *kinds;
};

static struct part part_of(size_t number) {
    size_t sectors = len / SECTOR / THREADS;
    struct part part = {number * sectors, sectors, getpid() * 64 + number, calloc(sectors, 1)};
    NEED(part.kinds);
    memset(part.kinds, first_kind, sectors);
    return part;
}

static size_t count_of(const struct part *part, int i) { return 1 + mix(part->seed + i) % MOST; }
static size_t place_of(const struct part *part, int i) {
    return mix(part->seed + i + ((uint64_t)i << 32)) % (part->sectors - MOST);
}

static void check_part(const struct part *part) {
    char expected[SECTOR];
    for (size_t s = part->first; s < part->first + part->sectors; s++) {
        if (part->kinds[s - part->first] == 4) continue;
        put_sectors(expected, s, 1, part->kinds[s - part->first]);
        NEED(memcmp(memory + s * SECTOR, expected, SECTOR) == 0);
    }
}

static void *change(void *number) {
    struct part part = part_of((size_t)number);
    for (int i = 0; i < rounds; i++) {
        size_t count = count_of(&part, i), at = place_of(&part, i), first = part.first + at;
        ssize_t bytes = count * SECTOR;
        int kind = i % 2 ? 1 : 3;
        if (kind == 1) NEED(pread(file, memory + first * SECTOR, bytes, first * SECTOR) == bytes);
        else put_sectors(memory + first * SECTOR, first, count, kind);
        memset(part.kinds + at, kind, count);
        if (i % 16 == 0) usleep(500);
    }
    return check_part(&part), NULL;
}

/* Sends what the other thread of the process receives, so late that it waits in the call. */
static int ends[2];
static void *send_late(void *number) {
    struct part part = part_of((size_t)number);
    char sent[MOST * SECTOR];
    for (int i = 0; i < rounds / 200; i++) {
        size_t count = count_of(&part, i);
        put_sectors(sent, part.first + place_of(&part, i), count, 2);
        usleep(mix(i) % 100000);
        NEED(write(ends[0], sent, count * SECTOR) == (ssize_t)(count * SECTOR));
    }
    return NULL;
}

static void *receive(void *number) {
    struct part part = part_of((size_t)number);
    pthread_t sender;
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    NEED(pthread_create(&sender, NULL, send_late, number) == 0);
    for (int i = 0; i < rounds / 200; i++) {
        size_t count = count_of(&part, i), at = place_of(&part, i);
        ssize_t bytes = count * SECTOR;
        NEED(recv(ends[1], memory + (part.first + at) * SECTOR, bytes, MSG_WAITALL) == bytes);
        memset(part.kinds + at, 2, count);
    }
    NEED(pthread_join(sender, NULL) == 0);
    return check_part(&part), NULL;
}

static pthread_t threads[THREADS];
static void start_threads(void) {
    for (size_t n = 0; n < THREADS; n++) NEED(pthread_create(&threads[n], NULL, n ? change : receive, (void *)n) == 0);
}
static void join_threads(void) {
    for (size_t n = 0; n < THREADS; n++) NEED(pthread_join(threads[n], NULL) == 0);
}

int main(int argc, char **argv) {
    NEED(argc == 4);
    int count = atoi(argv[1]);
    pid_t pids[64];
    len = (size_t)atoi(argv[2]) * MIB, rounds = atoi(argv[3]);
    memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(memory != MAP_FAILED && count <= 64 && (file = memfd_create("sectors", 0)) >= 0);
    put_sectors(memory, 0, len / SECTOR, 1);
    NEED(write(file, memory, len) == (ssize_t)len);
    put_sectors(memory, 0, len / SECTOR, 0);
    start_threads();
    for (int i = 0; i < count; i++) {
        usleep(10000);
        NEED((pids[i] = fork()) >= 0);
        if (pids[i] == 0) {
            first_kind = 4;
            start_threads();
            join_threads();
            _exit(3);
        }
    }
    join_threads();
    for (int i = 0; i < count; i++) NEED(WEXITSTATUS(wait_for(pids[i])) == 3);
    puts("right");
    return 0;
}
