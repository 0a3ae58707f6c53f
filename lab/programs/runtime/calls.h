/* System calls that read and write memory of the program. */
#include "regions.h"
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/random.h>

enum { PER_CALL = 256 };

/* Pages of one side of a copy, as runs of addresses. */
struct side {
    struct page *page[PER_CALL];
    struct iovec run[PER_CALL];
    size_t count, runs;
};

static void gather(struct side *side, unsigned slot, size_t first, size_t count, int order, int is_target) {
    struct range it = range(slot, first, count, order);
    side->count = side->runs = 0;
    for (size_t i = 0; i < it.count && side->count < PER_CALL; i++) {
        size_t p = page_of(&it, i);
        struct page *page = &it.region->page[p];
        struct iovec *last = side->runs ? &side->run[side->runs - 1] : NULL;
        int is_seen = 0;
        for (size_t n = 0; n < side->count; n++) is_seen |= side->page[n] == page;
        if (is_seen || (page->flags & LAZY) || !(is_target ? is_writable(page) : is_readable(page))) continue;
        side->page[side->count++] = page;
        if (last && (char *)last->iov_base + last->iov_len == bytes_of(it.region, p)) last->iov_len += PAGE;
        else side->run[side->runs++] = (struct iovec){bytes_of(it.region, p), PAGE};
    }
}

/* Leaves the first `count` pages. */
static void shorten(struct side *side, size_t count) {
    size_t len = count * PAGE;
    side->count = count;
    for (side->runs = 0; len; side->runs++) {
        struct iovec *run = &side->run[side->runs];
        if (run->iov_len > len) run->iov_len = len;
        len -= run->iov_len;
    }
}

enum way { PIPE, SOCKET, MESSAGE, FILE_VECTOR, FILE_EACH, FILE_DIRECT, PROCESS, SPLICED };

static void need_pages(ssize_t got, size_t pages) { NEED(got == (ssize_t)(pages * PAGE)); }

static void copy_by_pipe(struct side *from, struct side *to, int is_spliced) {
    int end[2];
    NEED(pipe2(end, O_CLOEXEC) == 0);
    need_pages(is_spliced ? vmsplice(end[1], from->run, from->runs, 0) : writev(end[1], from->run, from->runs), from->count);
    need_pages(readv(end[0], to->run, to->runs), to->count);
    close(end[0]);
    close(end[1]);
}

static void copy_by_socket(struct side *from, struct side *to, int is_message) {
    int end[2];
    struct msghdr out = {.msg_iov = from->run, .msg_iovlen = from->runs}, in = {.msg_iov = to->run, .msg_iovlen = to->runs};
    NEED(socketpair(AF_UNIX, (is_message ? SOCK_SEQPACKET : SOCK_STREAM) | SOCK_CLOEXEC, 0, end) == 0);
    need_pages(sendmsg(end[1], &out, 0), from->count);
    need_pages(recvmsg(end[0], &in, MSG_WAITALL), to->count);
    close(end[0]);
    close(end[1]);
}

static void copy_by_file(struct side *from, struct side *to, enum way way) {
    int file = open_file(way == FILE_DIRECT ? O_DIRECT : 0);
    off_t at = 0;
    if (way != FILE_EACH) {
        need_pages(pwritev(file, from->run, from->runs, 0), from->count);
        need_pages(preadv(file, to->run, to->runs, 0), to->count);
    } else {
        for (size_t i = 0; i < from->runs; at += from->run[i++].iov_len)
            NEED(pwrite(file, from->run[i].iov_base, from->run[i].iov_len, at) == (ssize_t)from->run[i].iov_len);
        NEED(lseek(file, 0, SEEK_SET) == 0);
        for (size_t i = 0; i < to->runs; i++) NEED(read(file, to->run[i].iov_base, to->run[i].iov_len) == (ssize_t)to->run[i].iov_len);
    }
    close(file);
}

/* Copies pages by system calls: at most 16 by those that wait for a reader. */
static void copy_pages(enum way way, unsigned slot, size_t first, int order, unsigned to_slot, size_t to_first, int to_order, size_t count) {
    struct side *from = malloc(sizeof *from), *to = malloc(sizeof *to);
    struct content content[PER_CALL];
    int is_small = way < FILE_VECTOR || way == SPLICED;
    NEED(from && to);
    gather(from, slot, first, count, order, 0);
    gather(to, to_slot, to_first, count, to_order, 1);
    size_t least = from->count < to->count ? from->count : to->count;
    if (is_small && least > 14) least = 14;
    /* This call copies page by page, so the two must be apart. Scattered sides may overlap. */
    if (way == PROCESS && region_of(slot) == region_of(to_slot)) least = 0;
    if (least) {
        shorten(from, least);
        shorten(to, least);
        for (size_t i = 0; i < least; i++) content[i] = from->page[i]->now;
        for (size_t i = 0; i < least; i++) begin_change(to->page[i], content[i]);
        if (way == PROCESS) need_pages(process_vm_readv(getpid(), to->run, to->runs, from->run, from->runs, 0), least);
        else if (way == PIPE || way == SPLICED) copy_by_pipe(from, to, way == SPLICED);
        else if (way == SOCKET || way == MESSAGE) copy_by_socket(from, to, way == MESSAGE);
        else copy_by_file(from, to, way);
        for (size_t i = 0; i < least; i++) end_change(to->page[i]);
    }
    free(from);
    free(to);
}

/* The kernel fills pages: with zeros, and with what can only be remembered. */
static void receive_pages(unsigned slot, size_t first, size_t count, int order) {
    struct side *to = malloc(sizeof *to);
    char copy[PAGE];
    int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    NEED(to && zeros >= 0);
    gather(to, slot, first, count, order, 1);
    for (size_t i = 0; i < to->count; i++) begin_change(to->page[i], (struct content){0});
    if (to->count) need_pages(readv(zeros, to->run, to->runs), to->count);
    for (size_t i = 0; i < to->count; i++) end_change(to->page[i]);
    close(zeros);
    if (to->count) {
        char *bytes = to->run[0].iov_base;
        to->page[0]->flags |= UNKNOWN;
        /* A signal ends this call early. */
        for (size_t got = 0; got < PAGE;) {
            ssize_t more = getrandom(bytes + got, PAGE - got, 0);
            NEED(more > 0 || errno == EINTR);
            got += more > 0 ? more : 0;
        }
        memcpy(copy, bytes, PAGE);
        (void)madvise(bytes, PAGE, MADV_PAGEOUT);
        NEED(memcmp(copy, bytes, PAGE) == 0);
        /* Until all is filled, a child that is copied must not know the page. */
        struct content next = {.seed = new_seed(), .kind = NOISE};
        for (unsigned w = 0; w < PAGE / 8; w++) ((uint64_t *)bytes)[w] = filled_word(NOISE, key_of(next), w);
        begin_change(to->page[0], next);
        end_change(to->page[0]);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        to->page[0]->flags &= ~UNKNOWN;
    }
    free(to);
}

/* A stack of many pages across a call. */
static __attribute__((noinline)) void stack_pages(size_t count) {
    uint64_t bytes[32 * PAGE / 8], key = mix(new_seed());
    for (unsigned w = 0; w < sizeof bytes / 8; w++) bytes[w] = mix(key + w);
    if (count > 32) stack_pages(count - 32);
    else usleep(100);
    for (unsigned w = 0; w < sizeof bytes / 8; w++) NEED(bytes[w] == mix(key + w));
}

/* Blocks of malloc, which grow. */
static void heap_pages(size_t count) {
    size_t words = count * PAGE / 8;
    uint64_t *at = malloc(words * 8), key = mix(new_seed());
    NEED(at);
    for (size_t w = 0; w < words; w++) at[w] = mix(key + w);
    NEED(at = realloc(at, words * 16));
    for (size_t w = words; w < words * 2; w++) at[w] = mix(key + w);
    NEED(at = realloc(at, words * 12));
    for (size_t w = 0; w < words * 3 / 2; w++) NEED(at[w] == mix(key + w));
    free(at);
}

struct served {
    int faults, stop;
    char *at;
    uint64_t key;
};

static void *serve_faults(void *arg) {
    struct served *served = arg;
    uint64_t bytes[PAGE / 8] __attribute__((aligned(4096)));
    struct uffd_msg message;
    struct pollfd wait[] = {{.fd = served->faults, .events = POLLIN}, {.fd = served->stop, .events = POLLIN}};
    for (;;) {
        NEED(poll(wait, 2, -1) > 0 || errno == EINTR);
        if (wait[1].revents) return NULL;
        if (!(wait[0].revents & POLLIN) || read(served->faults, &message, sizeof message) != sizeof message) continue;
        uint64_t at = message.arg.pagefault.address & ~(PAGE - 1);
        for (unsigned w = 0; w < PAGE / 8; w++) bytes[w] = mix(served->key + (at - (uintptr_t)served->at) + w);
        struct uffdio_copy copy = {.dst = at, .src = (uintptr_t)bytes, .len = PAGE};
        NEED(ioctl(served->faults, UFFDIO_COPY, &copy) == 0 || errno == EEXIST);
    }
}

/* Memory with a userfaultfd of the program's own. */
static void own_faults(size_t count) {
    struct uffdio_api api = {.api = UFFD_API};
    struct served served = {.key = mix(new_seed())};
    size_t len = count * PAGE;
    int stop[2];
    pthread_t thread;
    served.faults = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
    if (served.faults < 0) return;
    NEED(pipe2(stop, O_CLOEXEC) == 0 && ioctl(served.faults, UFFDIO_API, &api) == 0);
    served.stop = stop[0];
    served.at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(served.at != MAP_FAILED);
    struct uffdio_register own = {.range = {(uintptr_t)served.at, len}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    NEED(ioctl(served.faults, UFFDIO_REGISTER, &own) == 0);
    NEED(pthread_create(&thread, NULL, serve_faults, &served) == 0);
    for (size_t p = 0; p < count; p++)
        for (unsigned w = 0; w < PAGE / 8; w++) NEED(((uint64_t *)(served.at + p * PAGE))[w] == mix(served.key + p * PAGE + w));
    close(stop[1]);
    pthread_join(thread, NULL);
    close(stop[0]);
    close(served.faults);
    NEED(munmap(served.at, len) == 0);
}
