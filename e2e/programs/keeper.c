/* Holds incompressible data. Runs a command for each line on standard input, and prints a line
 * at its end: "fill N" adds N MiB, "check" verifies all, "race" does so in four threads, and
 * "change" writes to a part. */
#include "common.h"

#define PARTS 64

struct part {
    uint64_t *words;
    size_t count;
    uint64_t version;
} parts[PARTS];
int used;

static uint64_t word_of(struct part *p, size_t i) {
    uint64_t changed = p->version && i % 4096 < 64 ? p->version : 0;
    return mix((uint64_t)(p - parts) << 48 ^ i) ^ changed;
}

/* Verifies every byte, beginning with the part of this number. */
static void *verify(void *from) {
    for (int n = 0; n < used; n++) {
        struct part *p = &parts[(n + (uintptr_t)from) % used];
        for (size_t i = 0; i < p->count; i++)
            if (p->words[i] != word_of(p, i)) {
                printf("WRONG at word %zu of part %d\n", i, (int)(p - parts));
                exit(98);
            }
    }
    return NULL;
}

int main(void) {
    char line[64];
    printf("ready %d\n", getpid());
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        size_t mib;
        if (sscanf(line, "fill %zu", &mib) == 1) {
            struct part *p = &parts[used++];
            NEED(used <= PARTS);
            p->words = map(mib * MIB);
            p->count = mib * MIB / 8;
            for (size_t i = 0; i < p->count; i++) p->words[i] = word_of(p, i);
        } else if (!strncmp(line, "change", 6)) {
            for (struct part *p = parts; p < parts + used; p++) {
                p->version++;
                for (size_t i = 0; i < p->count; i++)
                    if (i % 4096 < 64) p->words[i] = word_of(p, i);
            }
        } else if (!strncmp(line, "race", 4)) {
            pthread_t threads[4];
            for (uintptr_t n = 0; n < 4; n++) NEED(!pthread_create(&threads[n], NULL, verify, (void *)n));
            for (int n = 0; n < 4; n++) pthread_join(threads[n], NULL);
        } else {
            verify(NULL);
        }
        puts("right");
        fflush(stdout);
    }
    return 0;
}
