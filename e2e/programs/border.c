/* border MIB: memory that the kernel keeps in two areas, with a border in the middle of a block.
 * Fills pages, touches them at random, and checks them. Prints "right". */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, SPAN = 8 }; /* pages between borders */

static void fill(uint64_t *page, uint64_t number)
{
    for (int i = 0; i < PAGE / 8; i++) page[i] = i % 3 ? number : number * 0x9e3779b97f4a7c15u * (i + 1);
}

int main(int n, char **arg)
{
    size_t pages = (size_t)atol(arg[1]) << 8;
    char *at = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (n != 2 || at == MAP_FAILED) return 1;
    for (size_t page = 2; page < pages; page += 2 * SPAN)
        if (madvise(at + page * PAGE, SPAN * PAGE, MADV_SEQUENTIAL)) return 1;
    uint64_t want[PAGE / 8], random = 7;
    for (size_t page = 0; page < pages; page++) fill((uint64_t *)(at + page * PAGE), page);
    for (size_t i = 0; i < 4 * pages; i++) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        size_t page = (random >> 33) % pages;
        fill(want, page);
        if (memcmp(at + page * PAGE, want, PAGE)) return printf("wrong in page %zu\n", page), 1;
        /* A written page is stored again, in another block. */
        if (random >> 63) fill((uint64_t *)(at + page * PAGE), page);
    }
    puts("right");
    return 0;
}
