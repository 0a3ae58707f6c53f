/* A program built with a sanitizer. Threads fill heap memory and verify it, and copy a text. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEN (24ul << 20)

static void *work(void *number) {
    size_t n = (size_t)number;
    unsigned char *memory = malloc(LEN), *copy = malloc(LEN);
    for (size_t at = 0; at < LEN; at += 64) memory[at] = at / 4096 % 251 + n;
    for (size_t at = 0; at < LEN; at += 4096) memcpy(copy + at, memory + at, 4096);
    size_t wrong = 0;
    for (int round = 0; round < 2; round++)
        for (size_t at = 0; at < LEN; at += 64) wrong += memory[at] != (unsigned char)(at / 4096 % 251 + n) || memory[at] != copy[at];
    free(memory);
    free(copy);
    return (void *)wrong;
}

int main(void) {
    pthread_t threads[2];
    void *wrong[2];
    for (size_t n = 0; n < 2; n++) pthread_create(threads + n, NULL, work, (void *)n);
    for (size_t n = 0; n < 2; n++) pthread_join(threads[n], wrong + n);
    puts(wrong[0] || wrong[1] ? "wrong" : "right");
    return 0;
}
