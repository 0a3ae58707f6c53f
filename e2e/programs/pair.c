/* Overwrites pages so that their XXH3-128 stays the same. They must not be taken for unchanged. */
#include "common.h"

static const size_t LEN = 64 * UNIT;
static char *p;

/* The public secret of XXH3 makes one factor of each product 0. So only x + y of the two words
 * remains. */
static void put(uint64_t x, uint64_t y) {
    for (size_t page = 0; page < LEN / PAGE; page++) {
        uint64_t *at = (uint64_t *)(p + page * PAGE);
        at[0] = x << 32 | 0x396cfeb8;
        at[8] = y << 32 | 0x2c81017c;
    }
}

static void check_pair(uint64_t x, uint64_t y) {
    size_t wrong = 0;
    for (size_t page = 0; page < LEN / PAGE; page++) {
        uint64_t *at = (uint64_t *)(p + page * PAGE), key = page_key(1, page);
        int right = at[0] == (x << 32 | 0x396cfeb8) && at[8] == (y << 32 | 0x2c81017c);
        for (unsigned w = 0; w < PAGE / 8; w++) right &= w == 0 || w == 8 || at[w] == word(key, w);
        wrong += !right;
    }
    if (wrong) {
        fprintf(stderr, "WRONG: %zu of %zu pages\n", wrong, LEN / PAGE);
        exit(98);
    }
}

int main(int argc, char **argv) {
    NEED(argc == 2 && is(argv[1], "pair"));
    p = map(LEN);
    fill(p, LEN, 1);
    uint64_t x[] = {1, 2, 0, 8}, y[] = {7, 6, 8, 0};
    for (int i = 0; i < 4; i++) {
        put(x[i], y[i]);
        push_out(p, LEN);
        check_pair(x[i], y[i]);
    }
    puts("right");
    return 0;
}
