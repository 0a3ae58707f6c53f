/* System calls whose buffers are folded. */
#include "common.h"

static const size_t LEN = 40 * UNIT;

static void *feed(void *arg) {
    int *fd = arg;
    char *p = map(LEN);
    fill(p, LEN, 2);
    for (size_t done = 0; done < LEN;) {
        ssize_t n = write(*fd, p + done, LEN - done);
        NEED(n > 0);
        done += n;
    }
    return NULL;
}

int main(void) {
    char *p = map(LEN), *q = map(LEN);
    fill(p, LEN, 1);
    fill(q, LEN, 9);
    push_out(p, LEN);
    char name[] = "/tmp/memfold-calls-XXXXXX";
    int fd = mkstemp(name);
    NEED(fd >= 0 && unlink(name) == 0);
    NEED(write(fd, p, LEN / 2) == (ssize_t)(LEN / 2));
    struct iovec parts[64];
    for (int i = 0; i < 64; i++) parts[i] = (struct iovec){p + LEN / 2 + i * (LEN / 128), LEN / 128};
    NEED(pwritev(fd, parts, 64, LEN / 2) == (ssize_t)(LEN / 2));
    push_out(q, LEN);
    NEED(pread(fd, q, LEN / 2, 0) == (ssize_t)(LEN / 2));
    for (int i = 0; i < 64; i++) parts[i].iov_base = q + LEN / 2 + i * (LEN / 128);
    NEED(preadv(fd, parts, 64, LEN / 2) == (ssize_t)(LEN / 2));
    check(q, LEN, 1);
    check(p, LEN, 1);
    /* Direct I/O, and a shared mapping of the file. */
    push_out(q, LEN);
    char *shared = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(shared != MAP_FAILED);
    NEED(memcmp(shared, q, LEN) == 0);
    munmap(shared, LEN);
    int ends[2];
    NEED(pipe(ends) == 0);
    pthread_t thread;
    NEED(!pthread_create(&thread, NULL, feed, &ends[1]));
    push_out(q, LEN);
    for (size_t done = 0; done < LEN;) {
        ssize_t n = read(ends[0], q + done, LEN - done);
        NEED(n > 0);
        done += n;
    }
    NEED(!pthread_join(thread, NULL));
    check(q, LEN, 2);
    int pair[2];
    NEED(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    push_out(p, LEN);
    push_out(q, LEN);
    for (size_t at = 0; at < LEN; at += 64 << 10) {
        struct iovec out[2] = {{p + at, 24 << 10}, {p + at + (24 << 10), 40 << 10}}, in = {q + at, 64 << 10};
        struct msghdr from = {.msg_iov = out, .msg_iovlen = 2}, to = {.msg_iov = &in, .msg_iovlen = 1};
        NEED(sendmsg(pair[0], &from, 0) == 64 << 10);
        NEED(recvmsg(pair[1], &to, 0) == 64 << 10);
    }
    check(q, LEN, 1);
    /* process_vm_readv from another process, and calls that write small results to folded
     * addresses. */
    fill(q, LEN, 3);
    push_out(p, LEN);
    for (size_t at = 0; at < LEN; at += UNIT) {
        struct iovec to = {q + at, UNIT}, from = {p + at, UNIT};
        NEED(process_vm_readv(getpid(), &to, 1, &from, 1, 0) > 0);
        struct timespec *now = (struct timespec *)(p + at + PAGE * 3);
        NEED(clock_gettime(CLOCK_MONOTONIC, now) == 0 && syscall(SYS_clock_gettime, CLOCK_MONOTONIC, now) == 0);
        NEED(now->tv_sec > 0 || now->tv_nsec > 0);
        fill_from(p + at + PAGE * 3, PAGE, 1, at / PAGE + 3);
        uint32_t *word = (uint32_t *)(p + at + 5 * PAGE);
        NEED(syscall(SYS_futex, word, 1 /* wake */, 1, NULL, NULL, 0) == 0);
    }
    check(p, LEN, 1);
    puts("right");
}
