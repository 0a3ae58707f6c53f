/* Buffers of system calls are held in memory, and nothing else is: with many waiting threads,
 * many parts, parts beside inaccessible memory, calls that wait for another thread of the
 * program, and calls that end half-way. */
#include "bare.h"
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <sys/stat.h>

#define read(...) EITHER(read, __VA_ARGS__)
#define recv(fd, at, len, flags) (by_instruction ? CALL6(SYS_recvfrom, fd, at, len, flags, 0, 0, 0) : recv(fd, at, len, flags))
#define writev(...) EITHER(writev, __VA_ARGS__)
#define sendmsg(...) EITHER(sendmsg, __VA_ARGS__)
#define recvmsg(...) EITHER(recvmsg, __VA_ARGS__)
#define sendmmsg(...) EITHER(sendmmsg, __VA_ARGS__)
#define recvmmsg(...) EITHER(recvmmsg, __VA_ARGS__)

#define LEN (128 * UNIT)
/* More than the resident limit of the program, and far less than the test's memory. */
#define MANY_PAGES (56 * UNIT / PAGE)

static int quiet[2], waiting;

static void *waits(void *arg) {
    (void)arg;
    char byte[3];
    __atomic_add_fetch(&waiting, 1, __ATOMIC_SEQ_CST);
    NEED(read(quiet[0], byte, sizeof byte) == sizeof byte);
    return NULL;
}

static pthread_t thread[2000];

static void start_waiting(int count) {
    NEED(pipe(quiet) == 0);
    pthread_attr_t attributes;
    NEED(!pthread_attr_init(&attributes) && !pthread_attr_setstacksize(&attributes, 64 << 10));
    for (int i = 0; i < count; i++) NEED(!pthread_create(&thread[i], &attributes, waits, NULL));
    /* Waits until the last thread sleeps in the kernel. */
    while (__atomic_load_n(&waiting, __ATOMIC_SEQ_CST) < count) sched_yield();
    for (int i = 0; i < 1000; i++) sched_yield();
}

static void end_waiting(int count) {
    char bytes[3] = {1, 2, 3};
    for (int i = 0; i < count; i++) NEED(write(quiet[1], bytes, sizeof bytes) == sizeof bytes);
    for (int i = 0; i < count; i++) NEED(!pthread_join(thread[i], NULL));
}

static void wait_with(int count) {
    start_waiting(count);
    char *p = map(LEN);
    fill(p, LEN, 1);
    push_out(p, LEN);
    NEED(present(p, LEN) < MANY_PAGES);
    check(p, LEN, 1);
    end_waiting(count);
}
/* More threads than any fixed number of hold slots. */
static void threads(void) { wait_with(300); }
static void thousands(void) { wait_with(2000); }

/* A discard removes untouched memory, even if a waiting call names it. */
static void discarded(void) {
    start_waiting(300);
    char *p = map(LEN), *empty = map(4 * LEN);
    fill(p, LEN, 1);
    push_out(p, LEN);
    NEED(madvise(empty, 4 * LEN, MADV_DONTNEED) == 0);
    NEED(present(empty, 4 * LEN) == 0);
    check(p, LEN, 1);
    end_waiting(300);
}

/* Small parts, with inaccessible gaps between them. */
#define PARTS 64
#define STEP MIB
#define USED (256ul << 10)
static char *base;
static struct iovec part[PARTS];

static void lay_parts(void) {
    base = mmap(NULL, PARTS * STEP, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(base != MAP_FAILED);
    for (int i = 0; i < PARTS; i++) {
        NEED(!mprotect(base + i * STEP, USED, PROT_READ | PROT_WRITE));
        memset(base + i * STEP, 'a' + i % 26, USED);
    }
}

/* Chooses other pages than before, because refaulting pages stay resident. */
static void choose_parts(void) {
    static int turn;
    turn += 5;
    for (int i = 0; i < PARTS; i++) part[i] = (struct iovec){base + i * STEP + turn * PAGE + 100, 10};
}

static char *page_of(int i) { return (char *)((uintptr_t)part[i].iov_base & -PAGE); }

static void fold_parts(void) {
    for (int round = 0; round < 100; round++) {
        if (!filler) filler = map(48 * UNIT);
        fill(filler, 48 * UNIT, 777 + round);
        size_t there = 0;
        for (int i = 0; i < PARTS; i++) there += present(page_of(i), PAGE);
        if (there < PARTS) return;
        usleep(5000);
    }
    fail("memory was not folded", __FILE__, __LINE__);
}

static void check_parts(const char *got) {
    for (int i = 0; i < PARTS; i++)
        for (int k = 0; k < 10; k++) NEED(got[i * 10 + k] == 'a' + i % 26);
}

static void gaps(void) {
    lay_parts();
    int ends[2], pair[2];
    char got[PARTS * 10];
    NEED(pipe(ends) == 0 && socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
    struct msghdr all = {.msg_iov = part, .msg_iovlen = PARTS};
    choose_parts();
    fold_parts();
    NEED(writev(ends[1], part, PARTS) == sizeof got && read(ends[0], got, sizeof got) == sizeof got);
    check_parts(got);
    choose_parts();
    fold_parts();
    NEED(sendmsg(pair[0], &all, 0) == sizeof got && recv(pair[1], got, sizeof got, 0) == sizeof got);
    check_parts(got);
    /* A datagram is lost if it can't be received. */
    NEED(send(pair[0], got, sizeof got, 0) == sizeof got);
    choose_parts();
    for (int i = 0; i < PARTS; i++) memset(part[i].iov_base, 'Z', 10);
    fold_parts();
    NEED(recvmsg(pair[1], &all, 0) == sizeof got);
    for (int i = 0; i < PARTS; i++) memcpy(got + i * 10, part[i].iov_base, 10);
    check_parts(got);
    /* One message for each part. A socket's queue has few places. */
    static struct mmsghdr each[PARTS];
    for (int i = 0; i < PARTS; i++) each[i].msg_hdr = (struct msghdr){.msg_iov = &part[i], .msg_iovlen = 1};
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    choose_parts();
    fold_parts();
    NEED(sendmmsg(pair[0], each, PARTS, 0) == PARTS && recv(pair[1], got, sizeof got, MSG_WAITALL) == sizeof got);
    check_parts(got);
    NEED(send(pair[0], got, sizeof got, 0) == sizeof got);
    choose_parts();
    for (int i = 0; i < PARTS; i++) memset(part[i].iov_base, 'Z', 10);
    fold_parts();
    NEED(recvmmsg(pair[1], each, PARTS, 0, NULL) == PARTS);
    for (int i = 0; i < PARTS; i++) memcpy(got + i * 10, part[i].iov_base, 10);
    check_parts(got);
    /* The messages before an invalid one are still sent. */
    choose_parts();
    fold_parts();
    each[40].msg_hdr.msg_iov = &(struct iovec){base + 40 * STEP + USED + PAGE, 10};
    NEED(sendmmsg(pair[0], each, PARTS, 0) == 40 && recv(pair[1], got, 400, MSG_WAITALL) == 400);
}

/* Parts far apart load only their own pages. */
static void spread_over(char *p, int count) {
    static struct iovec far[1024];
    for (int i = 0; i < count; i++) far[i] = (struct iovec){p + LEN / count * i + 64, 64};
    int ends[2];
    static char got[64 * 1024];
    NEED(pipe(ends) == 0);
    push_out(p, LEN);
    NEED(writev(ends[1], far, count) == 64 * count);
    NEED(present(p, LEN) < MANY_PAGES);
    NEED(read(ends[0], got, 64 * count) == 64 * count);
    for (int i = 0; i < count; i++) NEED(!memcmp(got + 64 * i, far[i].iov_base, 64));
    close(ends[0]), close(ends[1]);
}

static void spread(void) {
    char *p = map(LEN);
    fill(p, LEN, 3);
    spread_over(p, 64);
    spread_over(p, 512);
    spread_over(p, 1024);
    /* One part for each page. */
    enum { MESSAGES = 64, EACH = LEN / PAGE / MESSAGES };
    static struct mmsghdr all[MESSAGES];
    static struct iovec far[MESSAGES][EACH];
    int pair[2];
    NEED(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    for (int i = 0; i < MESSAGES; i++) {
        for (int k = 0; k < EACH; k++) far[i][k] = (struct iovec){p + (i * EACH + k) * PAGE, 1};
        all[i].msg_hdr = (struct msghdr){.msg_iov = far[i], .msg_iovlen = EACH};
    }
    push_out(p, LEN);
    static char got[MESSAGES * EACH];
    NEED(sendmmsg(pair[0], all, MESSAGES, 0) == MESSAGES);
    NEED(recv(pair[1], got, sizeof got, MSG_WAITALL) == sizeof got);
    for (size_t i = 0; i < sizeof got; i++) NEED(got[i] == p[i * PAGE]);
    check(p, LEN, 3);
}

/* An environment whose strings lie far apart. */
static void environment(void) {
    enum { STRINGS = 64 };
    char *p = map(LEN), *given[STRINGS + 1] = {0};
    fill(p, LEN, 4);
    for (int i = 0; i < STRINGS; i++) {
        given[i] = p + LEN / STRINGS * i + PAGE;
        snprintf(given[i], 64, "NUMBER_%d=%d", i, i * i);
    }
    push_out(p, LEN);
    pid_t pid;
    char *argv[] = {"sh", "-c", "exit $((NUMBER_7 + NUMBER_9))", NULL};
    NEED(posix_spawn(&pid, "/bin/sh", NULL, NULL, argv, given) == 0);
    NEED(present(p, LEN) < MANY_PAGES);
    NEED(WEXITSTATUS(wait_for(pid)) == 49 + 81);
}

/* Memory whose faults another thread serves. That thread maps memory first. */
static int served;
static void *serve(void *arg) {
    (void)arg;
    static char source[PAGE] __attribute__((aligned(PAGE)));
    memset(source, 77, PAGE);
    for (struct uffd_msg message; (read)(served, &message, sizeof message) == sizeof message;) {
        munmap(map(UNIT), UNIT);
        struct uffdio_copy copy = {.dst = message.arg.pagefault.address & ~(PAGE - 1), .src = (uintptr_t)source, .len = PAGE};
        ioctl(served, UFFDIO_COPY, &copy);
    }
    return NULL;
}

static char *serve_memory(size_t len) {
    char *p = map(len);
    struct uffdio_register all = {.range = {(uintptr_t)p, len}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    NEED(!ioctl(served, UFFDIO_REGISTER, &all));
    return p;
}

/* Calls that wait for that thread must not block it. */
static void filled(void) {
    char *own = map(LEN);
    fill(own, LEN, 5);
    push_out(own, LEN);
    served = syscall(SYS_userfaultfd, O_CLOEXEC);
    struct uffdio_api api = {.api = UFFD_API};
    NEED(served >= 0 && !ioctl(served, UFFDIO_API, &api));
    pthread_t server;
    NEED(!pthread_create(&server, NULL, serve, NULL));
    enum { SIZE = 256 << 10 };
    char *p = serve_memory(SIZE);
    NEED(!mlock(p, SIZE) && p[0] == 77 && present(p, SIZE) == SIZE / PAGE);
    p = serve_memory(SIZE);
    NEED(!mlock2(p, SIZE, 0) && p[5 * PAGE] == 77);
    p = serve_memory(SIZE);
    NEED(!madvise(p, SIZE, MADV_POPULATE_WRITE) && p[7 * PAGE] == 77);
    p = serve_memory(SIZE);
    NEED(!madvise(p, SIZE, MADV_POPULATE_READ) && p[9 * PAGE] == 77);
    p = serve_memory(SIZE);
    NEED(!madvise(p, SIZE, MADV_WILLNEED) && !madvise(p, SIZE, MADV_DONTNEED) && !munmap(p, SIZE));
    check(own, LEN, 5);
    NEED(!munmap(own, LEN));
    NEED(!munmap(filler, 48 * UNIT));
    p = serve_memory(SIZE);
    NEED(!mlockall(MCL_CURRENT) && present(p, SIZE) == SIZE / PAGE);
    NEED(!munlockall());
    own = map(LEN);
    filler = NULL;
    fill(own, LEN, 6);
    push_out(own, LEN);
    check(own, LEN, 6);
}

/* If a process is killed while it writes, the file's offset is the end of the written bytes. The
 * next writer continues there. */
static void killed(void) {
    char *p = map(LEN);
    fill(p, LEN, 8);
    push_out(p, LEN);
    char name[] = "/tmp/memfold-held-XXXXXX", byte = 1;
    int fd = mkstemp(name);
    NEED(fd >= 0 && !unlink(name));
    pid_t pid = fork();
    if (!pid) {
        NEED((by_instruction ? CALL6(SYS_write, fd, p, LEN, 0, 0, 0, 0) : write(fd, p, LEN)) == (ssize_t)LEN);
        pause();
    }
    for (struct stat about = {0}; about.st_size < (off_t)UNIT;) NEED(!fstat(fd, &about));
    kill(pid, SIGKILL);
    NEED(WTERMSIG(wait_for(pid)) == SIGKILL);
    NEED((write)(fd, &byte, 1) == 1);
    static char got[UNIT];
    off_t end = lseek(fd, 0, SEEK_CUR) - 1;
    NEED(end >= (off_t)UNIT && end % PAGE == 0);
    for (off_t at = 0; at < end; at += sizeof got) {
        ssize_t some = pread(fd, got, sizeof got < (size_t)(end - at) ? sizeof got : (size_t)(end - at), at);
        NEED(some > 0);
        check_from(got, some, 8, at / PAGE);
    }
}

/* Children of vfork are killed while the engine serves them. Their parent continues. */
static volatile pid_t victim;
static void *kill_children(void *arg) {
    for (uint64_t turn = 1; !*(volatile int *)arg; turn++) {
        pid_t pid = victim;
        if (!pid) continue;
        for (volatile unsigned i = 0; i < mix(turn) % 100000; i++) {}
        kill(pid, SIGKILL);
        victim = 0;
    }
    return NULL;
}
static void children(void) {
    char *p = map(LEN);
    volatile int over = 0;
    fill(p, LEN, 10);
    push_out(p, LEN);
    pthread_t killer;
    NEED(!pthread_create(&killer, NULL, kill_children, (void *)&over));
    volatile uint64_t at = 1;
    for (volatile int i = 0; i < 600; i++) {
        pid_t pid = vfork();
        if (!pid) {
            victim = syscall(SYS_getpid);
            for (int k = 0; k < 3000; k++) {
                at = mix(at);
                char *page = p + at % (LEN / PAGE) * PAGE;
                check_from(page, PAGE, 10, (page - p) / PAGE);
                if (k % 100 == 0) munmap(map(UNIT), UNIT);
            }
            _exit(0);
        }
        int status = wait_for(pid);
        NEED(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 0);
        for (size_t k = 0; k < 50; k++) {
            at = mix(at);
            check_from(p + at % (LEN / PAGE) * PAGE, PAGE, 10, at % (LEN / PAGE));
        }
        victim = 0;
    }
    over = 1;
    NEED(!pthread_join(killer, NULL));
    check(p, LEN, 10);
}

/* Parts of a call that the program has protected itself, while they are folded: the call fails
 * with EFAULT. */
static void closed(void) {
    lay_parts();
    int pair[2];
    char got[PARTS * 10];
    NEED(socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) == 0);
    struct msghdr all = {.msg_iov = part, .msg_iovlen = PARTS};
    for (int access = PROT_NONE; access <= PROT_READ; access++) {
        choose_parts();
        fold_parts();
        for (int i = 0; i < PARTS; i += 3) NEED(!mprotect(page_of(i), PAGE, access));
        if (access) {
            NEED(send(pair[0], got, sizeof got, 0) == sizeof got);
            NEED(recvmsg(pair[1], &all, MSG_DONTWAIT) == -1 && errno == EFAULT);
        } else {
            NEED(sendmsg(pair[0], &all, 0) == -1 && errno == EFAULT);
            NEED(write(pair[0], page_of(0), 100) == -1 && errno == EFAULT);
        }
        for (int i = 0; i < PARTS; i += 3) NEED(!mprotect(page_of(i), PAGE, PROT_READ | PROT_WRITE));
    }
    choose_parts();
    for (int i = 0; i < PARTS; i++) memset(part[i].iov_base, 'a' + i % 26, 10);
    fold_parts();
    NEED(sendmsg(pair[0], &all, 0) == sizeof got && recv(pair[1], got, sizeof got, 0) == sizeof got);
    check_parts(got);
}

static int sender;
static void *send_all(void *arg) {
    (void)arg;
    static char chunk[64 << 10];
    for (int i = 0; i < 64; i++) NEED((send)(sender, chunk, sizeof chunk, 0) == sizeof chunk);
    return NULL;
}

/* A socket with a high SO_RCVLOWAT returns the data in one call. */
static void low_water(void) {
    char *own = map(LEN), *to = map(4 * MIB);
    fill(own, LEN, 9);
    push_out(own, LEN);
    int listener = socket(AF_INET, SOCK_STREAM, 0), big = 8 << 20, low = 1 << 20;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    NEED(!setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &big, sizeof big));
    NEED(!bind(listener, (void *)&at, sizeof at) && !getsockname(listener, (void *)&at, &len) && !listen(listener, 1));
    sender = socket(AF_INET, SOCK_STREAM, 0);
    NEED(!connect(sender, (void *)&at, sizeof at));
    int socket = accept(listener, NULL, NULL);
    NEED(socket >= 0 && !setsockopt(socket, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low));
    pthread_t sends;
    NEED(!pthread_create(&sends, NULL, send_all, NULL));
    NEED(recv(socket, to, 4 * MIB, 0) >= low);
    _exit(puts("right") < 0 || fflush(stdout));
}

/* A call that names more memory than it writes changes no mapped file beside folded memory, and
 * does not end its sharing. */
static void beside_a_file(void) {
    enum { PAGES = 64 };
    char name[] = "/tmp/memfold-held-XXXXXX", *page = malloc(PAGE);
    int file = mkstemp(name), ends[2];
    NEED(file >= 0 && unlink(name) == 0 && pipe(ends) == 0 && ftruncate(file, 2 * PAGES * PAGE) == 0);
    memset(page, 'a', PAGE);
    for (int n = 0; n < PAGES; n++) NEED(pwrite(file, page, PAGE, n * PAGE) == (ssize_t)PAGE);
    char *p = map(LEN + 2 * PAGES * PAGE), *own = p + LEN, *holes = own + PAGES * PAGE;
    NEED(mmap(own, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == own);
    NEED(mmap(holes, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, PAGES * PAGE) == holes);
    fill(p, LEN, 9);
    push_out(p, LEN);
    struct stat before, after;
    NEED(fstat(file, &before) == 0);
    NEED(write(ends[1], "0123456789", 10) == 10);
    NEED(read(ends[0], own - PAGE, (2 * PAGES + 1) * PAGE) == 10 && !memcmp(own - PAGE, "0123456789", 10));
    NEED(fsync(file) == 0 && fstat(file, &after) == 0);
    NEED(before.st_blocks == after.st_blocks);
    memset(page, 'b', PAGE);
    for (int n = 0; n < PAGES; n++) NEED(pwrite(file, page, PAGE, n * PAGE) == (ssize_t)PAGE);
    for (int n = 0; n < PAGES; n++) NEED(own[n * PAGE] == 'b' && holes[n * PAGE] == 0);
    check_from(p, LEN - PAGE, 9, 0);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"beside", beside_a_file},
        {"threads", threads}, {"thousands", thousands}, {"discarded", discarded}, {"gaps", gaps}, {"spread", spread},
        {"environment", environment}, {"filled", filled}, {"killed", killed}, {"children", children}, {"low_water", low_water},
        {"closed", closed},
    };
    return RUN_NAMED(argc, argv, all);
}
