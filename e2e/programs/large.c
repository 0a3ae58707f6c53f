/* Calls on buffers far larger than the resident limit. */
#include "common.h"
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/timerfd.h>
#include <sys/resource.h>

/* More than the resident limit, and more than a call may hold: 40 MiB by `gate.rs`. */
static const size_t LEN = 64 * MIB;
static char *from, *to;

/* The bytes of a pattern, one window at a time, in memory that is not folded. */
static __thread char window[64 << 10];

static void *pour(void *arg) {
    int fd = *(int *)arg;
    for (size_t at = 0; at < LEN; at += sizeof window) {
        fill_from(window, sizeof window, 1, at / PAGE);
        for (size_t done = 0; done < sizeof window;) {
            ssize_t n = write(fd, window + done, sizeof window - done);
            NEED(n > 0);
            done += n;
        }
    }
    return NULL;
}

static void *drain(void *arg) {
    int fd = *(int *)arg;
    for (size_t at = 0; at < LEN; at += sizeof window) {
        for (size_t done = 0; done < sizeof window;) {
            ssize_t n = read(fd, window + done, sizeof window - done);
            NEED(n > 0);
            done += n;
        }
        check_from(window, sizeof window, 1, at / PAGE);
    }
    return NULL;
}

static int file(void) {
    char name[] = "/tmp/memfold-large-XXXXXX";
    int fd = mkstemp(name);
    NEED(fd >= 0 && unlink(name) == 0);
    return fd;
}

static void fresh(void) {
    NEED(madvise(to, LEN, MADV_DONTNEED) == 0);
}

static void begin(void) {
    from = map(LEN);
    to = map(LEN);
    fill(from, LEN, 1);
}

static void files(void) {
    begin();
    int fd = file();
    NEED(write(fd, from, LEN) == (ssize_t)LEN);
    NEED(lseek(fd, 0, SEEK_CUR) == (off_t)LEN);
    NEED(read(fd, to, LEN) == 0 && lseek(fd, 0, SEEK_CUR) == (off_t)LEN);
    NEED(lseek(fd, 3 * PAGE, SEEK_SET) == 3 * PAGE);
    NEED(read(fd, to, LEN) == (ssize_t)(LEN - 3 * PAGE) && lseek(fd, 0, SEEK_CUR) == (off_t)LEN);
    check_from(to, LEN - 3 * PAGE, 1, 3);
    fresh();
    NEED(pread(fd, to, LEN, 0) == (ssize_t)LEN && lseek(fd, 0, SEEK_CUR) == (off_t)LEN);
    check(to, LEN, 1);
    fresh();
    /* Parts of many sizes, some of them empty. */
    struct iovec parts[100];
    size_t at = 0;
    for (int i = 0; i < 100; i++) {
        size_t len = i % 7 == 3 ? 0 : i % 5 == 1 ? 8 : i == 99 ? LEN - at : (MIB / 2 + i * 2 * PAGE + 16);
        parts[i] = (struct iovec){to + at, len};
        at += len;
    }
    NEED(at == LEN);
    NEED(lseek(fd, 0, SEEK_SET) == 0 && readv(fd, parts, 100) == (ssize_t)LEN);
    check(to, LEN, 1);
    NEED(ftruncate(fd, 0) == 0 && pwritev(fd, parts, 100, 5 * PAGE) == (ssize_t)LEN);
    fresh();
    NEED(preadv(fd, parts, 100, 5 * PAGE) == (ssize_t)LEN);
    check(to, LEN, 1);
    /* The end of the buffer is unreadable, or unwritable. The call transfers the bytes before
     * it. */
    NEED(mprotect(to + LEN / 2, PAGE, PROT_NONE) == 0);
    NEED(pread(fd, to, LEN, 5 * PAGE) == (ssize_t)(LEN / 2));
    NEED(lseek(fd, 5 * PAGE, SEEK_SET) > 0 && read(fd, to, LEN) == (ssize_t)(LEN / 2));
    NEED(lseek(fd, 0, SEEK_CUR) == (off_t)(5 * PAGE + LEN / 2));
    NEED(read(fd, to + LEN / 2, LEN / 2) == -1 && errno == EFAULT);
    NEED(pread(fd, to, LEN, -1) == -1 && errno == EINVAL && preadv(fd, parts, 100, -1) == -1 && errno == EINVAL);
    close(fd);
    /* With O_DIRECT where the file system supports it. */
    char name[] = "/tmp/memfold-direct-XXXXXX";
    fd = mkostemp(name, O_DIRECT);
    if (fd >= 0) {
        NEED(unlink(name) == 0 && write(fd, from, LEN) == (ssize_t)LEN);
        NEED(mprotect(to + LEN / 2, PAGE, PROT_READ | PROT_WRITE) == 0);
        fresh();
        NEED(pread(fd, to, LEN, 0) == (ssize_t)LEN);
        check(to, LEN, 1);
    }
}

/* A record consists of several pieces. */
enum { RECORD = MIB, RECORDS = 16 };
static int shared_fd;
static size_t records[4];

/* Each read at the shared offset returns one whole record. */
static void *records_of(void *arg) {
    size_t own = (uintptr_t)arg;
    char *at = to + own * RECORDS * RECORD;
    for (ssize_t n; (n = read(shared_fd, at, RECORD)) != 0; at += n) {
        NEED(n == RECORD);
        records[own]++;
    }
    return NULL;
}

static void shared_offset(void) {
    begin();
    shared_fd = file();
    NEED(write(shared_fd, from, RECORDS * RECORD) == RECORDS * RECORD && lseek(shared_fd, 0, SEEK_SET) == 0);
    pthread_t thread[4];
    for (long i = 0; i < 4; i++) NEED(!pthread_create(&thread[i], NULL, records_of, (void *)i));
    for (int i = 0; i < 4; i++) NEED(!pthread_join(thread[i], NULL));
    size_t all = 0;
    for (int i = 0; i < 4; i++) {
        all += records[i];
        for (size_t r = 0; r < records[i]; r++) {
            char *at = to + (i * RECORDS + r) * RECORD;
            size_t n = 0;
            while (n < RECORDS && memcmp(at, from + n * RECORD, 64)) n++;
            NEED(n < RECORDS);
            check_from(at, RECORD, 1, n * RECORD / PAGE);
        }
    }
    NEED(all == RECORDS && lseek(shared_fd, 0, SEEK_CUR) == RECORDS * RECORD);
}

static void pipes(void) {
    begin();
    int ends[2];
    pthread_t thread;
    NEED(pipe(ends) == 0 && !pthread_create(&thread, NULL, drain, &ends[0]));
    NEED(write(ends[1], from, LEN) == (ssize_t)LEN);
    NEED(!pthread_join(thread, NULL));
    NEED(!pthread_create(&thread, NULL, pour, &ends[1]));
    for (size_t done = 0; done < LEN;) {
        ssize_t n = read(ends[0], to + done, LEN - done);
        NEED(n > 0);
        done += n;
    }
    NEED(!pthread_join(thread, NULL));
    check(to, LEN, 1);
    /* One read returns all data in the pipe, up to the pipe's size. */
    long size = fcntl(ends[1], F_SETPIPE_SZ, MIB);
    NEED(size >= (long)MIB && write(ends[1], from, MIB) == MIB);
    fresh();
    NEED(read(ends[0], to, LEN) == MIB);
    check(to, MIB, 1);
    NEED(fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0 && fcntl(ends[1], F_SETFL, O_NONBLOCK) == 0);
    NEED(read(ends[0], to, LEN) == -1 && errno == EAGAIN);
    ssize_t n = write(ends[1], from, LEN);
    NEED(n > 0 && n <= (ssize_t)size && write(ends[1], from, LEN) == -1 && errno == EAGAIN);
    NEED(read(ends[0], to, LEN) == n);
    check(to, n, 1);
    signal(SIGPIPE, SIG_IGN);
    close(ends[0]);
    NEED(write(ends[1], from, LEN) == -1 && errno == EPIPE);
}

static void sockets(void) {
    begin();
    int pair[2];
    pthread_t thread;
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0 && !pthread_create(&thread, NULL, drain, &pair[0]));
    NEED(send(pair[1], from, LEN, 0) == (ssize_t)LEN);
    NEED(!pthread_join(thread, NULL));
    NEED(!pthread_create(&thread, NULL, drain, &pair[0]));
    struct iovec parts[2] = {{from, LEN / 2 + 24}, {from + LEN / 2 + 24, LEN / 2 - 24}};
    NEED(writev(pair[1], parts, 2) == (ssize_t)LEN);
    NEED(!pthread_join(thread, NULL));
    NEED(!pthread_create(&thread, NULL, pour, &pair[0]));
    for (size_t done = 0; done < LEN;) {
        ssize_t n = recv(pair[1], to + done, LEN - done, 0);
        NEED(n > 0);
        done += n;
    }
    NEED(!pthread_join(thread, NULL));
    check(to, LEN, 1);
    fresh();
    NEED(!pthread_create(&thread, NULL, pour, &pair[0]));
    NEED(recv(pair[1], to, LEN, MSG_WAITALL) == (ssize_t)LEN);
    NEED(!pthread_join(thread, NULL));
    check(to, LEN, 1);
    NEED(recv(pair[1], to, LEN, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    /* A signal ends a send with the number of bytes sent, and without an error. */
    ssize_t n = send(pair[1], from, LEN, MSG_DONTWAIT);
    NEED(n > 0 && send(pair[1], from, LEN, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    close(pair[0]);
    signal(SIGPIPE, SIG_IGN);
    NEED(send(pair[1], from, LEN, 0) == -1 && errno == EPIPE);
}

static volatile int alarms;
static void on_alarm(int signal) { alarms++; }

/* Signals end no call on a file. They end other calls with the number of bytes transferred. */
static void interrupted(void) {
    begin();
    for (int flags = 0; flags <= SA_RESTART; flags += SA_RESTART) {
        struct sigaction action = {.sa_handler = on_alarm, .sa_flags = flags};
        NEED(sigaction(SIGALRM, &action, NULL) == 0);
        struct itimerval often = {{0, 700}, {0, 700}}, never = {{0, 0}, {0, 0}};
        NEED(setitimer(ITIMER_REAL, &often, NULL) == 0);
        int fd = file();
        for (size_t done = 0; done < LEN;) {
            ssize_t n = write(fd, from + done, LEN - done);
            NEED(n == (ssize_t)(LEN - done));
            done += n;
        }
        NEED(pread(fd, to, LEN, 0) == (ssize_t)LEN);
        int ends[2];
        pthread_t thread;
        sigset_t block, before;
        sigfillset(&block);
        NEED(pipe(ends) == 0 && pthread_sigmask(SIG_SETMASK, &block, &before) == 0);
        NEED(!pthread_create(&thread, NULL, drain, &ends[0]));
        NEED(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
        for (size_t done = 0; done < LEN;) {
            ssize_t n = write(ends[1], from + done, LEN - done);
            NEED(n > 0 || (n == -1 && errno == EINTR && !flags));
            if (n > 0) done += n;
        }
        NEED(setitimer(ITIMER_REAL, &never, NULL) == 0);
        NEED(!pthread_join(thread, NULL));
        check(to, LEN, 1);
        fresh();
        close(fd), close(ends[0]), close(ends[1]);
    }
    NEED(alarms > 10);
}

enum { READERS = 100, WAITED_FOR = MIB / 2 };
static int quiet[2];
static pthread_barrier_t waiting;

static void *reader(void *arg) {
    char *buffer = to + (uintptr_t)arg * WAITED_FOR;
    pthread_barrier_wait(&waiting);
    ssize_t n = read(quiet[0], buffer, WAITED_FOR);
    NEED(n == 0 || n == 1);
    return NULL;
}

/* A hundred threads wait for input with a large buffer each, and all other memory is folded. */
static void readers(void) {
    begin();
    fill(to, LEN, 2);
    pthread_t thread[READERS];
    NEED(pipe(quiet) == 0 && !pthread_barrier_init(&waiting, NULL, READERS + 1));
    for (long i = 0; i < READERS; i++) NEED(!pthread_create(&thread[i], NULL, reader, (void *)i));
    pthread_barrier_wait(&waiting);
    check(from, LEN, 1);
    check_from(to + PAGE, LEN - PAGE, 2, 1);
    NEED(write(quiet[1], "x", 1) == 1);
    close(quiet[1]);
    for (int i = 0; i < READERS; i++) NEED(!pthread_join(thread[i], NULL));
}

/* One message needs one call: it is sent whole, past the limit. */
static void messages(void) {
    begin();
    int pair[2], size = 64 * MIB;
    NEED(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) == 0);
    NEED(setsockopt(pair[0], SOL_SOCKET, SO_SNDBUFFORCE, &size, sizeof size) == 0);
    NEED(send(pair[0], from, 2 * MIB, 0) == 2 * MIB);
    NEED(recv(pair[1], to, LEN, 0) == 2 * MIB);
    check(to, 2 * MIB, 1);
    /* An append needs one call. */
    char name[] = "/tmp/memfold-large-XXXXXX";
    int fd = mkostemp(name, O_APPEND);
    NEED(fd >= 0 && unlink(name) == 0 && write(fd, from, 24 * MIB) == 24 * MIB);
    fresh();
    NEED(pread(fd, to, LEN, 0) == 24 * MIB);
    check(to, 24 * MIB, 1);
}

/* A call touches no more of a buffer than can come. */
static void is_untouched(void) {
    NEED(present(to, LEN) * PAGE < 2 * MIB);
    fresh();
}

static void untouched(void) {
    begin();
    fresh();
    int event = eventfd(7, 0), timer = timerfd_create(CLOCK_MONOTONIC, 0);
    NEED(read(event, to, LEN) == 8 && *(uint64_t *)to == 7);
    is_untouched();
    struct itimerspec soon = {.it_value.tv_nsec = 1};
    NEED(timerfd_settime(timer, 0, &soon, NULL) == 0 && read(timer, to, LEN) == 8);
    is_untouched();
    sigset_t set;
    NEED(!sigemptyset(&set) && !sigaddset(&set, SIGUSR1) && !sigprocmask(SIG_BLOCK, &set, NULL));
    int signals = signalfd(-1, &set, 0);
    NEED(raise(SIGUSR1) == 0 && read(signals, to, LEN) == sizeof(struct signalfd_siginfo));
    is_untouched();
    int udp = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof own;
    NEED(!bind(udp, (void *)&own, len) && !getsockname(udp, (void *)&own, &len) && !connect(udp, (void *)&own, len));
    /* The longest datagram. */
    const ssize_t most = 65507;
    NEED(send(udp, from, most, 0) == most && recv(udp, to, LEN, 0) == most);
    check(to, 15 * PAGE, 1);
    is_untouched();
    struct sockaddr_in sender = {0};
    len = sizeof sender;
    NEED(send(udp, from, most, 0) == most && recvfrom(udp, to, LEN, 0, (void *)&sender, &len) == most);
    NEED(len == sizeof sender && sender.sin_port == own.sin_port && sender.sin_addr.s_addr == own.sin_addr.s_addr);
    check(to, 15 * PAGE, 1);
    is_untouched();
    int master = posix_openpt(O_RDWR | O_NOCTTY);
    NEED(master >= 0 && !grantpt(master) && !unlockpt(master));
    int terminal = open(ptsname(master), O_RDWR | O_NOCTTY);
    NEED(terminal >= 0 && write(master, "a line\n", 7) == 7 && read(terminal, to, LEN) == 7 && !memcmp(to, "a line\n", 7));
    is_untouched();
    NEED(read(master, to, LEN) == 8 && !memcmp(to, "a line\r\n", 8));
    is_untouched();
    int status = open("/proc/self/status", O_RDONLY);
    NEED(read(status, to, LEN) > 100 && !memcmp(to, "Name:", 5) && read(status, to, LEN) == 0);
    is_untouched();
    NEED(pread(status, to, LEN, 0) > 100);
    is_untouched();
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"files", files},     {"offset", shared_offset}, {"pipes", pipes},       {"sockets", sockets},
        {"signals", interrupted}, {"readers", readers},  {"messages", messages},
        {"untouched", untouched},
    };
    return RUN_NAMED(argc, argv, all);
}
