/* Fills heap memory and frees parts of it, so that the allocator gives memory back. Whatever calloc
 * returns must be zeros, and everything else must stay. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BLOCKS = 256, BYTES = 256 << 10, ROUNDS = 12 };

static unsigned char *blocks[BLOCKS];

static int is(const unsigned char *block, int byte) {
    for (size_t at = 0; at < BYTES; at++)
        if (block[at] != (unsigned char)byte) return 0;
    return 1;
}

int main(void) {
    for (int round = 0; round < ROUNDS; round++) {
        for (int n = 0; n < BLOCKS; n++) {
            if (blocks[n]) continue;
            if (!(blocks[n] = calloc(1, BYTES))) return 3;
            if (!is(blocks[n], 0)) return printf("round %d: calloc returned old data\n", round), 1;
            memset(blocks[n], n + 1, BYTES);
        }
        for (int n = round % 3; n < BLOCKS; n += 3) {
            if (!is(blocks[n], n + 1)) return printf("round %d: wrong byte\n", round), 1;
            free(blocks[n]);
            blocks[n] = 0;
        }
        usleep(100000);
    }
    return puts("right"), 0;
}
