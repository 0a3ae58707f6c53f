/* Holds memory until its input ends. For each line on standard input it verifies all bytes and
 * prints a line. */
#include "common.h"

char *memory;

int main(int argc, char **argv) {
    size_t len = (argc > 1 ? atoi(argv[1]) : 96) * MIB;
    char line[64];
    memory = map(len);
    fill(memory, len, 1);
    printf("ready %d\n", getpid());
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        check(memory, len, 1);
        puts("right");
        fflush(stdout);
    }
    return 0;
}
