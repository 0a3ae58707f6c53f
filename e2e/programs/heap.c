/* The brk heap grows and shrinks. An array that realloc moves keeps its bytes. */
#include "common.h"
#include <malloc.h>

#define COUNT (6000 * UNIT / MIB)
static char *block[COUNT];

static size_t size_of(int i) { return (1 + mix(i) % 5) * PAGE; }

static void brk_heap(void) {
    NEED(mallopt(M_MMAP_THRESHOLD, 1 << 30) && mallopt(M_TRIM_THRESHOLD, 1 << 20));
    for (int round = 0; round < 2; round++) {
        char *before = sbrk(0);
        for (size_t i = 0; i < COUNT; i++) {
            NEED(block[i] = malloc(size_of(i)));
            fill(block[i], size_of(i), i + round);
        }
        NEED((char *)sbrk(0) > before || round);
        for (size_t i = 0; i < COUNT; i++) check(block[i], size_of(i), i + round);
        for (size_t i = 0; i < COUNT; i += 2) free(block[i]), block[i] = NULL;
        malloc_trim(0); /* Gives back pages in the middle of the heap. */
        for (size_t i = 1; i < COUNT; i += 2) check(block[i], size_of(i), i + round);
        for (size_t i = 0; i < COUNT; i += 2) {
            NEED(block[i] = calloc(1, size_of(i)));
            check_zero(block[i], size_of(i));
            fill(block[i], size_of(i), i + round);
        }
        for (size_t i = 0; i < COUNT; i++) check(block[i], size_of(i), i + round), free(block[i]);
        char *top = sbrk(0);
        malloc_trim(0);
        NEED((char *)sbrk(0) < top || round);
    }
}

static void growing_array(void) {
    size_t len = UNIT;
    char *p = malloc(len);
    fill(p, len, 1);
    while (len < 160 * UNIT) {
        size_t more = len + len / 2 / PAGE * PAGE;
        NEED(p = realloc(p, more));
        fill_from(p + len, more - len, 1, len / PAGE);
        len = more;
        if (len > 60 * UNIT) check(p, len, 1);
    }
    NEED(p = realloc(p, 40 * UNIT));
    check(p, 40 * UNIT, 1);
    free(p);
}

/* Fills memory as fast as possible, and prints the peak that the kernel counts, in KiB. */
static void fast_filler(void) {
    size_t len = 256 * UNIT;
    char *p = map(len);
    for (size_t at = 0; at < len; at += 16 * UNIT) fill_from(p + at, 16 * UNIT, 3, at / PAGE);
    check(p, len, 3);
    char line[256];
    FILE *f = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, f))
        if (!strncmp(line, "VmHWM", 5) || !strncmp(line, "RssAnon", 7)) fputs(line, stderr);
    fclose(f);
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    if (is(argv[1], "brk")) brk_heap();
    else if (is(argv[1], "realloc")) growing_array();
    else if (is(argv[1], "fast")) fast_filler();
    else return 2;
    puts("right");
}
