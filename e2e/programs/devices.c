/* Input and output that bypasses the page tables: O_DIRECT, and pages given to a pipe or a
 * socket. */
#include "bare.h"
#include <netinet/in.h>

static const size_t LEN = 40 * UNIT;
static const size_t PART = 256 << 10;

/* Opens a new file, with O_DIRECT if the file system supports it. /var/tmp is more often on a
 * disk than /tmp. */
static int open_file(void) {
    char name[] = "/var/tmp/memfold-devices-XXXXXX";
    int fd = mkstemp(name);
    NEED(fd >= 0);
    close(fd);
    fd = open(name, O_RDWR | O_DIRECT);
    if (fd < 0) {
        fd = open(name, O_RDWR);
        fprintf(stderr, "no O_DIRECT in /var/tmp\n");
    }
    NEED(fd >= 0 && unlink(name) == 0);
    return fd;
}

/* Asserts that the file holds the pattern. Reads it through a mapping, which the engine does not
 * manage. */
static void check_file(int fd, uint64_t seed) {
    char *shared = mmap(NULL, LEN, PROT_READ, MAP_SHARED, fd, 0);
    NEED(shared != MAP_FAILED);
    check(shared, LEN, seed);
    munmap(shared, LEN);
}

static void direct(void) {
    int fd = open_file();
    char *p = map_folded(LEN, 1), *q = map(LEN);
    for (size_t at = 0; at < LEN; at += 4 * PART) {
        struct iovec parts[4];
        for (int i = 0; i < 4; i++) parts[i] = (struct iovec){p + at + i * PART, PART};
        NEED(pwritev(fd, parts, 4, at) == (ssize_t)(4 * PART));
    }
    check_file(fd, 1);
    fill(q, LEN, 2);
    push_out(q, LEN);
    for (size_t at = 0; at < LEN; at += 4 * PART) NEED(pread(fd, q + at, 4 * PART, at) == (ssize_t)(4 * PART));
    check(q, LEN, 1);
    check(p, LEN, 1);
}

/* Pages given to a pipe keep their bytes, whatever is folded before they are read. */
static void splice_from(char *p, ssize_t (*give)(int, const struct iovec *, size_t, unsigned)) {
    int ends[2], copies[2];
    NEED(pipe(ends) == 0 && pipe(copies) == 0);
    const size_t some = 16 * PAGE;
    char *got = malloc(some);
    for (size_t at = 0; at + some <= LEN; at += 2 * MIB) {
        struct iovec part = {p + at, some};
        NEED(give(ends[1], &part, 1, 0) == (ssize_t)some);
        NEED(tee(ends[0], copies[1], some, 0) == (ssize_t)some);
        push_out(p, LEN);
        push_out(p, LEN);
        for (int i = 0; i < 2; i++) {
            for (size_t done = 0; done < some;) {
                ssize_t n = read(i ? ends[0] : copies[0], got + done, some - done);
                NEED(n > 0);
                done += n;
            }
            check_from(got, some, 9, at / PAGE);
        }
    }
    check(p, LEN, 9);
}

/* Used in tests whose name asks for the instruction. */
static ssize_t by_call(int fd, const struct iovec *parts, size_t n, unsigned flags) { return vmsplice(fd, parts, n, flags); }
static ssize_t by_syscall(int fd, const struct iovec *parts, size_t n, unsigned flags) {
    return syscall(SYS_vmsplice, fd, parts, n, flags);
}

static void splice_pages(void) {
    char *p = map_folded(LEN, 9);
    splice_from(p, by_call);
    if (!by_instruction) splice_from(p, by_syscall);
    /* The results of vmsplice without memfold. */
    int ends[2], file = open_file();
    char full[PAGE];
    struct iovec part = {p, 64 * PAGE}, back = {p + 5 * UNIT, PAGE};
    NEED(pipe(ends) == 0);
    NEED(vmsplice(file, &part, 1, 0) == -1 && errno == EBADF);
    NEED(vmsplice(-1, &part, 1, 0) == -1 && errno == EBADF);
    while (vmsplice(ends[1], &part, 1, SPLICE_F_NONBLOCK) > 0) {}
    NEED(errno == EAGAIN);
    NEED(!(fcntl(ends[1], F_GETFL) & O_NONBLOCK));
    NEED(read(ends[0], full, PAGE) == (ssize_t)PAGE);
    check_from(full, PAGE, 9, 0);
    NEED(vmsplice(ends[0], &back, 1, 0) == (ssize_t)PAGE);
    check_from(p + 5 * UNIT, PAGE, 9, 1);
}

/* A full pipe makes a writer wait. Its signals are handled meanwhile. */
static char *whole;
static int full[2];
static void *drain(void *unused) {
    char *got = malloc(LEN);
    size_t done = 0;
    usleep(100000);
    for (ssize_t n; done < LEN && (n = read(full[0], got + done, LEN - done)) > 0;) done += n;
    NEED(done == LEN);
    check(got, LEN, 9);
    return unused;
}
static volatile int alarms;
static void count(int signal) { alarms += signal == SIGALRM; }
static void splice_waits(void) {
    whole = map_folded(LEN, 9);
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_RESTART};
    struct itimerval often = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};
    NEED(sigaction(SIGALRM, &action, NULL) == 0);
    for (int nonblocking = 0; nonblocking < 2; nonblocking++) {
        pthread_t reader;
        NEED(pipe(full) == 0 && fcntl(full[1], F_SETFL, nonblocking ? O_NONBLOCK : 0) == 0);
        NEED(!pthread_create(&reader, NULL, drain, NULL));
        if (!nonblocking) NEED(setitimer(ITIMER_REAL, &often, NULL) == 0);
        for (size_t done = 0; done < LEN;) {
            struct iovec parts[] = {{whole + done, (LEN - done) / 3}, {NULL, 0}, {whole + done + (LEN - done) / 3, LEN - done - (LEN - done) / 3}};
            ssize_t n = vmsplice(full[1], parts, 3, 0);
            NEED(n > 0);
            done += n;
        }
        NEED(setitimer(ITIMER_REAL, &never, NULL) == 0 && !pthread_join(reader, NULL));
        close(full[0]), close(full[1]);
    }
    NEED(alarms > 10);
    /* A signal whose handler has no SA_RESTART ends the wait. */
    struct itimerval once = {{0, 0}, {0, 200000}};
    struct iovec part = {whole, LEN};
    action.sa_flags = 0;
    NEED(sigaction(SIGALRM, &action, NULL) == 0 && pipe(full) == 0);
    while (vmsplice(full[1], &part, 1, SPLICE_F_NONBLOCK) > 0) {}
    NEED(errno == EAGAIN && setitimer(ITIMER_REAL, &once, NULL) == 0);
    NEED(vmsplice(full[1], &part, 1, 0) == -1 && errno == EINTR);
    /* A pipe without a reader. */
    NEED(signal(SIGPIPE, SIG_IGN) != SIG_ERR && close(full[0]) == 0);
    NEED(vmsplice(full[1], &part, 1, 0) == -1 && errno == EPIPE);
    check(whole, LEN, 9);
}

/* Sets a variable to the value in the kernel's copy of the environment. memfold hides its own
 * variables from the program. */
static void keep_variable(const char *name, const char *as) {
    static char text[1 << 16];
    size_t len = strlen(name);
    FILE *file = fopen("/proc/self/environ", "r");
    NEED(file != NULL);
    size_t count = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    for (char *at = text; at < text + count; at += strlen(at) + 1)
        if (!strncmp(at, name, len) && at[len] == '=') NEED(!setenv(as, at + len + 1, 1));
}

/* A socket whose SO_ZEROCOPY was set outside of memfold: sends fail with ENOBUFS, as when no
 * more pages can be pinned. */
static void zerocopy_inherited(void) {
    const char *fd = getenv("ZEROCOPY_SOCKET");
    int out = fd ? atoi(fd) : socket(AF_INET, SOCK_STREAM, 0), one = 1;
    char self[] = "/proc/self/exe", name[64], *again[] = {self, "zerocopy_inherited", NULL}, *bare[] = {self, "zerocopy_inherited:bare", NULL};
    if (!fd) {
        /* First without memfold, which the environment prevents, and then with it. */
        snprintf(name, sizeof name, "%d", out);
        keep_variable("MEMFOLD_RUN", "KEPT_RUN");
        keep_variable("LD_PRELOAD", "KEPT_PRELOAD");
        NEED(out >= 0 && !setenv("ZEROCOPY_SOCKET", name, 1) && !setenv("MEMFOLD_DISABLE", "1", 1));
        execv(self, by_instruction ? bare : again);
        fail("execv", __FILE__, __LINE__);
    }
    if (getenv("MEMFOLD_DISABLE")) {
        NEED((setsockopt)(out, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == 0 && !unsetenv("MEMFOLD_DISABLE"));
        NEED(!setenv("MEMFOLD_RUN", getenv("KEPT_RUN"), 1) && !setenv("LD_PRELOAD", getenv("KEPT_PRELOAD"), 1));
        execv(self, by_instruction ? bare : again);
        fail("execv", __FILE__, __LINE__);
    }
    int server = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof at;
    NEED(bind(server, (struct sockaddr *)&at, len) == 0 && listen(server, 1) == 0);
    NEED(getsockname(server, (struct sockaddr *)&at, &len) == 0 && connect(out, (struct sockaddr *)&at, len) == 0);
    int in = accept(server, NULL, NULL);
    char *p = map_folded(LEN, 10), *got = malloc(PAGE);
    struct iovec part = {p, PAGE};
    struct mmsghdr message = {.msg_hdr = {.msg_iov = &part, .msg_iovlen = 1}};
    NEED(send(out, p, PAGE, MSG_ZEROCOPY) == -1 && errno == ENOBUFS);
    NEED(sendmsg(out, &message.msg_hdr, MSG_ZEROCOPY) == -1 && errno == ENOBUFS);
    NEED(sendmmsg(out, &message, 1, MSG_ZEROCOPY) == -1 && errno == ENOBUFS);
    NEED(instruct(SYS_sendto, out, (long)p, PAGE, MSG_ZEROCOPY, 0, 0) == -1 && errno == ENOBUFS);
    NEED(send(out, p, PAGE, 0) == PAGE && recv(in, got, PAGE, MSG_WAITALL) == PAGE);
    check(got, PAGE, 10);
    check(p, LEN, 10);
}

/* SO_ZEROCOPY is refused, so data given to a socket and not yet sent keeps its bytes. */
static void zerocopy(void) {
    char *p = map_folded(LEN, 10);
    int server = socket(AF_INET, SOCK_STREAM, 0), out = socket(AF_INET, SOCK_STREAM, 0), one = 1, small = 4096, large = 8 << 20;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof at;
    NEED(server >= 0 && out >= 0);
    NEED(setsockopt(server, SOL_SOCKET, SO_RCVBUF, &small, sizeof small) == 0);
    NEED(bind(server, (struct sockaddr *)&at, len) == 0 && listen(server, 1) == 0);
    NEED(getsockname(server, (struct sockaddr *)&at, &len) == 0 && connect(out, (struct sockaddr *)&at, len) == 0);
    int in = accept(server, NULL, NULL);
    NEED(in >= 0);
    NEED(setsockopt(out, SOL_SOCKET, SO_SNDBUF, &large, sizeof large) == 0);
    NEED(setsockopt(out, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == -1 && errno == EINVAL);
    NEED(syscall(SYS_setsockopt, out, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == -1 && errno == EINVAL);
    NEED(setsockopt(-1, SOL_SOCKET, SO_ZEROCOPY, &one, sizeof one) == -1 && errno == EBADF);
    ssize_t sent = send(out, p, 2 * MIB, MSG_ZEROCOPY | MSG_DONTWAIT);
    NEED(sent > (ssize_t)(16 * PAGE));
    push_out(p, LEN);
    push_out(p, LEN);
    sent -= sent % PAGE;
    char *got = malloc(2 * MIB);
    NEED(recv(in, got, sent, MSG_WAITALL) == sent);
    check(got, sent, 10);
    check(p, LEN, 10);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"direct", direct}, {"splice", splice_pages},
        {"zerocopy", zerocopy}, {"splice_waits", splice_waits}, {"zerocopy_inherited", zerocopy_inherited},
    };
    return RUN_NAMED(argc, argv, all);
}
