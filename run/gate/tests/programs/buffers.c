// Large buffers of a program's that go through system calls, and are checked.
#define _GNU_SOURCE
#include <assert.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 1 << 20, ROUNDS = 12, THREADS = 4 };
static volatile long ticks;
static char *alternate;
static void tick(int s) { char room[2000]; memset(room, s, sizeof room); ticks += room[5] == s; }
static char *map(size_t n) {
    char *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert(p != MAP_FAILED);
    return p;
}
static void fill(char *p, unsigned seed) {
    for (int i = 0; i < BYTES / 4; i++) ((unsigned *)p)[i] = seed = seed * 1664525 + 1013904223;
}
static void *work(void *self) {
    long id = (long)self;
    char *a = map(BYTES), *b = map(BYTES);
    for (int round = 0; round < ROUNDS; round++) {
        char name[] = "/tmp/memfold-gate-XXXXXX";
        char *path = b + 4096 * 7 - 10;  // over a boundary
        strcpy(path, name);
        int fd = mkstemp(path), s[2];
        assert(fd >= 0 && !unlink(path));
        fill(a, id * 100 + round);
        assert(pwrite(fd, a, BYTES, 0) == BYTES);
        memset(b, 0, BYTES);
        struct iovec *v = (struct iovec *)(map(BYTES) + 4096 * 3 - 8);
        for (int i = 0; i < 16; i++) v[i] = (struct iovec){b + i * (BYTES / 16), BYTES / 16};
        assert(preadv(fd, v, 16, 0) == BYTES && !memcmp(a, b, BYTES));
        struct stat *st = (struct stat *)(b + 4096 - 30);
        assert(!fstat(fd, st) && st->st_size == BYTES);
        assert(!socketpair(AF_UNIX, SOCK_STREAM, 0, s));
        int pid = fork();
        if (!pid) {
            for (size_t done = 0; done < BYTES;) done += write(s[0], a + done, BYTES - done);
            _exit(0);
        }
        close(s[0]);
        memset(b, 0, BYTES);
        struct msghdr *m = (struct msghdr *)(v + 17);
        memset(m, 0, sizeof *m);
        m->msg_iov = v, m->msg_iovlen = 1;
        for (size_t done = 0; done < BYTES;) {
            *v = (struct iovec){b + done, BYTES - done};
            ssize_t n = recvmsg(s[1], m, 0);
            assert(n > 0);
            done += n;
        }
        assert(!memcmp(a, b, BYTES));
        int *status = (int *)(b + 5 * 4096);
        while (waitpid(pid, status, 0) != pid) ;
        assert(*status == 0);
        close(s[1]), close(fd);
        munmap((char *)v - 4096 * 3 + 8, BYTES);
    }
    munmap(a, BYTES), munmap(b, BYTES);
    return self;
}

int main(void) {
    alternate = map(1 << 16);
    stack_t st = {.ss_sp = alternate, .ss_size = 1 << 16};
    sigaltstack(&st, 0);
    struct sigaction a = {.sa_handler = tick, .sa_flags = SA_RESTART | SA_ONSTACK};
    sigaction(SIGALRM, &a, 0);
    struct itimerval it = {{0, 1000}, {0, 1000}};
    setitimer(ITIMER_REAL, &it, 0);
    pthread_t t[THREADS];
    for (long i = 0; i < THREADS; i++) pthread_create(&t[i], 0, work, (void *)i);
    for (int i = 0; i < THREADS; i++) pthread_join(t[i], 0);
    while (ticks < 10) pause();
    puts("all there");
}
