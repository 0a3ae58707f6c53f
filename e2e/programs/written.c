/* Children of a fork that write to what they share with their parent. */
#include "common.h"
#include "members.h"

static char *memory;
static size_t len;

/* Returns the page that is written to as the n-th. */
static size_t page_of(const char *order, size_t n) {
    size_t pages = len / PAGE;
    if (is(order, "backward")) return pages - 1 - n;
    if (is(order, "random")) return n * 7919 % pages;
    return n;
}

static void write_all(const char *order, int done, int go) {
    char byte = 0;
    for (size_t n = 0; n < len / PAGE; n++) memory[page_of(order, n) * PAGE] ^= 0x55;
    NEED(write(done, &byte, 1) == 1);
    NEED(read(go, &byte, 1) == 0);
    for (size_t p = 0; p < len; p += PAGE) memory[p] ^= 0x55;
    verify(memory, len, 5);
    _exit(3);
}

/* written ORDER COUNT MIB: COUNT children write to each of MIB MiB. Prints the most memory, KiB, that
 * all processes had at once. */
int main(int argc, char **argv) {
    NEED(argc == 4);
    int count = atoi(argv[2]), go[2], done[2], left = count;
    len = atol(argv[3]) << 20;
    memory = map(len);
    hold(memory, len, 5);
    NEED(pipe(go) == 0 && pipe2(done, O_NONBLOCK) == 0);
    pid_t *pids = calloc(count, sizeof *pids);
    for (int i = 0; i < count; i++) {
        NEED((pids[i] = fork()) >= 0);
        if (pids[i]) continue;
        close(go[1]);
        write_all(argv[1], done[1], go[0]);
    }
    long most = 0;
    while (left > 0) {
        char bytes[64];
        ssize_t ended = read(done[0], bytes, sizeof bytes);
        left -= ended > 0 ? ended : 0;
        long kib = anonymous_kib(getpid());
        for (int i = 0; i < count; i++) kib += anonymous_kib(pids[i]);
        most = kib > most ? kib : most;
        usleep(2000);
    }
    close(go[1]);
    for (int i = 0; i < count; i++) NEED(WEXITSTATUS(wait_for(pids[i])) == 3);
    verify(memory, len, 5);
    printf("%ld\n", most);
    return 0;
}
