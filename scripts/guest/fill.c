// Holds more memory than there is, and checks each byte of it: fill MIB.
//
// A page holds words that say which page it is and how often it was written, half of it noise. All are written, then read in
// another order; a part is written anew, and all is read again.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { WORDS = 512, ROUNDS = 3 };

static uint64_t word(uint64_t page, uint64_t times, uint64_t at) {
    if (at % 16 >= 8)
        return page;
    uint64_t x = page * 0x9e3779b97f4a7c15 + times * 0xbf58476d1ce4e5b9 + at + 1;
    x ^= x >> 30, x *= 0xbf58476d1ce4e5b9, x ^= x >> 27, x *= 0x94d049bb133111eb;
    return x ^ x >> 31;
}

int main(int count, char **arguments) {
    uint64_t mib = count == 2 ? strtoull(arguments[1], 0, 10) : 0, pages = mib << 8;
    uint64_t *all = pages ? malloc(pages * WORDS * 8) : 0;
    uint8_t *times = pages ? calloc(pages, 1) : 0;
    if (!all || !times)
        return fprintf(stderr, "fill: no %llu MiB\n", (unsigned long long)mib), 2;
    for (int round = 0; round < ROUNDS; round++) {
        for (uint64_t page = 0; page < pages; page++)
            if (round == 0 || page % 7 == (uint64_t)round) {
                times[page]++;
                for (uint64_t at = 0; at < WORDS; at++)
                    all[page * WORDS + at] = word(page, times[page], at);
            }
        // 1000003 is prime, so every page comes once.
        for (uint64_t n = 0; n < pages; n++) {
            uint64_t page = n * 1000003 % pages;
            for (uint64_t at = 0; at < WORDS; at++)
                if (all[page * WORDS + at] != word(page, times[page], at))
                    return fprintf(stderr, "fill: page %llu, word %llu is wrong\n", (unsigned long long)page,
                                   (unsigned long long)at),
                           1;
        }
    }
    return printf("fill: %llu MiB were right\n", (unsigned long long)mib), 0;
}
