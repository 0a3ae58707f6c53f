/* A child of fork reads its memory. A part of it is read-only, so the engine can't make the pages private that the fork shares.
 * It once tried them again without end: over 20 s, instead of 0.1 s plainly. Needs a limit below what does not compress, and no
 * swap file:
 *
 *   gcc -O1 -pthread -I lab/programs/runtime -I e2e/programs -o found lab/programs/found/shared_read_only.c
 *   memfold run --limit 8M -- ./found
 *
 * Shrunk from a drawn program. */
#include "runtime.h"

static void list_1(void) {}

static void list_0(void) {
    write_pages(0, 0, 9999, IN_ORDER, NOISE);
    map_region(3, 1012);
    check_pages(3, 0, 9999, IN_ORDER);
    protect_pages(3, 452, 9999, PROT_READ);
    fork_list(1, CHECKS);
}

static const struct list all[] = {
    {list_0, 1},
    {list_1, 1},
};

int main(int argc, char **argv) {
    return run_program(argc, argv, all, 3482);
}
