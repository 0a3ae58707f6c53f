/* sparse HOW PAGES: maps 256 MiB and touches each PAGES-th page. Prints the KiB that the mapping takes. */
#include "common.h"

int main(int argc, char **argv) {
    NEED(argc == 3);
    const size_t len = 256 * MIB, step = strtoul(argv[2], NULL, 10) * PAGE, count = len / step;
    char *at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(at != MAP_FAILED);
    int reads = !strcmp(argv[1], "read"), random = !strcmp(argv[1], "random");
    uint64_t state = 1, sum = 0;
    for (size_t i = 0; i < count; i++) {
        state = state * 6364136223846793005ul + 1442695040888963407ul;
        size_t n = random ? (state >> 33) % count : !strcmp(argv[1], "backward") ? count - 1 - i : i;
        volatile uint64_t *word = (volatile uint64_t *)(at + n * step);
        if (reads) sum += *word;
        else *word = n + 1;
    }
    NEED(sum == 0);
    FILE *maps = fopen("/proc/self/smaps", "r");
    NEED(maps);
    char line[512];
    unsigned long start, end, kib = 0, part;
    int own = 0;
    while (fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) own = start < (unsigned long)at + len && (unsigned long)at < end;
        else if (own && sscanf(line, "Anonymous: %lu", &part) == 1) kib += part;
    }
    for (size_t n = 0; n < count; n++) {
        uint64_t word = *(volatile uint64_t *)(at + n * step);
        NEED(word == 0 || (!reads && word == n + 1));
    }
    printf("%lu\n", kib);
    return 0;
}
