/* Has memory of several kinds until its input ends: data that compresses, data that does not, locked
 * memory, a mapped file (its own), and shared memory. */
#include "common.h"

#define RANDOM_MIB 16
#define LOCKED_MIB 4
#define SHARED_MIB 6

static char *shared(size_t len) {
    char *p = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(p != MAP_FAILED);
    memset(p, 3, len);
    return p;
}

static void touch_file(const char *path) {
    int fd = open(path, O_RDONLY);
    NEED(fd >= 0);
    off_t len = lseek(fd, 0, SEEK_END);
    volatile char *p = mmap(NULL, len, PROT_READ, MAP_PRIVATE, fd, 0);
    NEED(p != MAP_FAILED);
    for (off_t at = 0; at < len; at += PAGE) (void)p[at];
}

int main(int argc, char **argv) {
    NEED(argc > 1);
    touch_file(argv[1]);
    shared(SHARED_MIB * MIB);
    char *locked = map(LOCKED_MIB * MIB);
    memset(locked, 4, LOCKED_MIB * MIB);
    NEED(!mlock(locked, LOCKED_MIB * MIB));
    uint64_t *noise = (uint64_t *)map(RANDOM_MIB * MIB);
    for (size_t i = 0; i < RANDOM_MIB * MIB / sizeof *noise; i++) noise[i] = mix(i);
    char *plain = map(64 * MIB), line[64];
    memset(plain, 5, 64 * MIB);
    /* Uses the rest again and again, so that the noise is evicted. */
    for (int round = 0; round < 4; round++)
        for (size_t at = 0; at < 64 * MIB; at += PAGE) plain[at] = round + at / PAGE;
    printf("ready %d\n", getpid());
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {}
    return 0;
}
