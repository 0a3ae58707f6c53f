/* A program with its own userfaultfd. It serves its own memory, registered before memfold has
 * adopted it or after. Every byte in that memory and around it is right. */
#include "bare.h"
#include <linux/userfaultfd.h>

#define LEN (48 * UNIT)
#define OWN (20 * UNIT)
#define OWN_LEN (2 * UNIT)

static int uffd;
static char served[PAGE] __attribute__((aligned(4096)));

static void *serve(void *unused) {
    struct uffd_msg message;
    memset(served, 77, PAGE);
    while (read(uffd, &message, sizeof message) == sizeof message) {
        struct uffdio_copy copy = {.dst = message.arg.pagefault.address & ~(PAGE - 1), .src = (uintptr_t)served, .len = PAGE};
        NEED(!ioctl(uffd, UFFDIO_COPY, &copy) || errno == EEXIST);
    }
    return unused;
}

static void open_with(uint64_t features) {
    struct uffdio_api api = {.api = UFFD_API, .features = features};
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
    /* Without a privilege it serves only faults in user mode. The test makes no others. */
    if (uffd < 0 && errno == EPERM) uffd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    NEED(uffd >= 0 && !ioctl(uffd, UFFDIO_API, &api));
}

static void begin(void) {
    pthread_t thread;
    open_with(0);
    NEED(!pthread_create(&thread, NULL, serve, NULL));
}

static void register_own(char *p, int by_number) {
    struct uffdio_register range = {.range = {(uintptr_t)p + OWN, OWN_LEN}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    NEED(!(by_number ? syscall(SYS_ioctl, uffd, UFFDIO_REGISTER, &range) : ioctl(uffd, UFFDIO_REGISTER, &range)));
}

static void use(char *p) {
    for (int round = 0; round < 2; round++) {
        fill(p, OWN, round);
        fill(p + OWN + OWN_LEN, LEN - OWN - OWN_LEN, round + 7);
        for (size_t at = OWN; at < OWN + OWN_LEN; at += PAGE) NEED(p[at] == 77 && p[at + PAGE - 1] == 77);
        check(p, OWN, round);
        check(p + OWN + OWN_LEN, LEN - OWN - OWN_LEN, round + 7);
    }
}

static void before(void) {
    char *p = map(LEN);
    register_own(p, 0);
    use(p);
}

/* Memory before it was touched in a row, which is when more than the touched page may be filled: to the middle of a block. */
static void streamed(void) {
    for (size_t odd = 0; odd < 8; odd++) {
        char *p = map(LEN), *own = p + OWN - odd * PAGE;
        for (char *at = p; at < own; at += PAGE) *at = 1;
        struct uffdio_register range = {.range = {(uintptr_t)own, OWN_LEN}, .mode = UFFDIO_REGISTER_MODE_MISSING};
        NEED(!ioctl(uffd, UFFDIO_REGISTER, &range));
        for (char *at = own; at < own + OWN_LEN; at += PAGE) NEED(*at == 77);
        for (char *at = p; at < own; at += PAGE) NEED(*at == 1);
        NEED(!munmap(p, LEN));
    }
}

static void after(int by_number) {
    char *p = map(LEN);
    fill(p, LEN, 3);
    check(p, LEN, 3);
    register_own(p, by_number);
    check(p, LEN, 3); /* The existing bytes stay. */
    NEED(!madvise(p + OWN, OWN_LEN, MADV_DONTNEED));
    use(p);
}

/* Pushes all memory filled before out of the page table by filling other memory. */
static void push(void) {
    char *p = map(LEN);
    for (int round = 0; round < 3; round++) fill(p, LEN, round);
    check(p, LEN, 2);
    munmap(p, LEN);
}

static volatile int calls;

static void answer(int signal, siginfo_t *info, void *context) {
    char *page = (char *)((uintptr_t)info->si_addr & ~(PAGE - 1));
    struct uffdio_copy copy = {.dst = (uintptr_t)page, .src = (uintptr_t)served, .len = PAGE};
    if (ioctl(uffd, UFFDIO_COPY, &copy)) {
        struct uffdio_writeprotect open = {.range = {(uintptr_t)page, PAGE}};
        NEED(errno == EEXIST && !ioctl(uffd, UFFDIO_WRITEPROTECT, &open));
    }
    calls++, (void)signal, (void)context;
}

/* Its faults arrive as signals, and all memory around is folded. */
static void signals(int protects) {
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO};
    NEED(!sigaction(SIGBUS, &action, NULL));
    memset(served, 77, PAGE);
    open_with(UFFD_FEATURE_SIGBUS | (protects ? UFFD_FEATURE_PAGEFAULT_FLAG_WP : 0));
    char *p = map(LEN), byte = 5;
    int pair[2];
    fill(p, LEN, 3);
    push();
    uint64_t mode = UFFDIO_REGISTER_MODE_MISSING | (protects ? UFFDIO_REGISTER_MODE_WP : 0);
    struct uffdio_register range = {.range = {(uintptr_t)p + OWN, OWN_LEN}, .mode = mode};
    NEED(!ioctl(uffd, UFFDIO_REGISTER, &range));
    check(p, LEN, 3);
    NEED(!calls && !madvise(p + OWN, OWN_LEN, MADV_DONTNEED));
    /* A fault in the kernel raises no signal. The call fails with EFAULT. */
    NEED(!pipe(pair) && write(pair[1], &byte, 1) == 1 && read(pair[0], p + OWN + PAGE, 1) == -1 && errno == EFAULT);
    use(p);
    NEED(calls == OWN_LEN / PAGE);
    if (protects) {
        struct uffdio_writeprotect shut = {.range = range.range, .mode = UFFDIO_WRITEPROTECT_MODE_WP};
        NEED(!ioctl(uffd, UFFDIO_WRITEPROTECT, &shut));
        for (size_t at = 0; at < OWN_LEN; at += PAGE) p[OWN + at] = at / PAGE;
        NEED(calls == 2 * OWN_LEN / PAGE);
        for (size_t at = 0; at < OWN_LEN; at += PAGE) NEED(p[OWN + at] == (char)(at / PAGE));
    }
    /* New memory mapped there is not registered. */
    NEED(munmap(p, LEN) == 0 && map_at(p, LEN, MAP_FIXED) == p);
    for (size_t at = 0; at < LEN; at += PAGE) NEED(!p[at]);
    fill(p, LEN, 9);
    push();
    check(p, LEN, 9);
}

static struct uffdio_register registered(char *p, size_t len) {
    struct uffdio_register range = {.range = {(uintptr_t)p, len}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    NEED(!ioctl(uffd, UFFDIO_REGISTER, &range));
    return range;
}

#ifndef UFFDIO_MOVE
struct uffdio_move { uint64_t dst, src, len, mode; int64_t move; };
#define UFFDIO_MOVE _IOWR(UFFDIO, 0x05, struct uffdio_move)
#endif
#ifndef UFFDIO_POISON
struct uffdio_poison { struct uffdio_range range; uint64_t mode; int64_t pages_updated; };
#define UFFDIO_POISON _IOWR(UFFDIO, 0x08, struct uffdio_poison)
#endif

/* Copies and moves from folded memory into its registered memory, and into unregistered memory. */
static void sources(void) {
    open_with(0);
    char *from = map(LEN), *to = map(LEN);
    fill(from, LEN, 3);
    push();
    registered(to, LEN);
    struct uffdio_copy copy = {.dst = (uintptr_t)to, .src = (uintptr_t)from, .len = LEN / 2};
    NEED(!ioctl(uffd, UFFDIO_COPY, &copy) && copy.copy == LEN / 2);
    struct uffdio_move move = {(uintptr_t)to + LEN / 2, (uintptr_t)from + LEN / 2, LEN / 2, 0, 0};
    /* Linux 6.8. */
    if (ioctl(uffd, UFFDIO_MOVE, &move)) {
        NEED(errno == EINVAL && !move.move);
        for (size_t at = LEN / 2; at < LEN; at += PAGE) {
            struct uffdio_copy page = {.dst = (uintptr_t)to + at, .src = (uintptr_t)from + at, .len = PAGE};
            NEED(!ioctl(uffd, UFFDIO_COPY, &page));
        }
    } else for (size_t at = LEN / 2; at < LEN; at += PAGE) NEED(!from[at]);
    check(to, LEN, 3);
    fill(from, LEN, 4);
    push();
    check(from, LEN, 4);
    check(to, LEN, 3);
}

/* A userfaultfd can't change memory that it has not registered, folded or not. */
static void misplaced(void) {
    open_with(UFFD_FEATURE_PAGEFAULT_FLAG_WP);
    char *p = map(LEN), *own = map(OWN_LEN);
    fill(p, LEN, 3);
    push();
    registered(own, OWN_LEN);
    NEED(!madvise(p + UNIT, 4 * UNIT, MADV_DONTNEED));
    for (size_t at = 0; at < LEN; at += 512 * PAGE) {
        uint64_t page = (uintptr_t)p + at;
        struct uffdio_copy copy = {.dst = page, .src = (uintptr_t)served, .len = PAGE};
        NEED(ioctl(uffd, UFFDIO_COPY, &copy) == -1 && errno == ENOENT && copy.copy == -ENOENT);
        struct uffdio_zeropage zero = {.range = {page, PAGE}};
        NEED(ioctl(uffd, UFFDIO_ZEROPAGE, &zero) == -1 && errno == ENOENT && zero.zeropage == -ENOENT);
        struct uffdio_writeprotect shut = {.range = {page, PAGE}, .mode = UFFDIO_WRITEPROTECT_MODE_WP};
        NEED(ioctl(uffd, UFFDIO_WRITEPROTECT, &shut) == -1 && errno == ENOENT);
        struct uffdio_move move = {page, (uintptr_t)served, PAGE, 0, 0};
        NEED(ioctl(uffd, UFFDIO_MOVE, &move) == -1 && (errno == ENOENT || errno == EINVAL));
        struct uffdio_poison poison = {.range = {page, PAGE}};
        NEED(ioctl(uffd, UFFDIO_POISON, &poison) == -1 && (errno == ENOENT || errno == EINVAL));
    }
    /* UFFDIO_UNREGISTER of such memory has no effect, whatever it returns. */
    struct uffdio_range all = {(uintptr_t)p, LEN};
    NEED(!ioctl(uffd, UFFDIO_UNREGISTER, &all) || errno == EINVAL);
    for (size_t at = 0; at < LEN; at += PAGE)
        if (at >= UNIT && at < 5 * UNIT) NEED(!p[at]);
    check(p, UNIT, 3);
    fill(p + UNIT, 4 * UNIT, 6);
    push();
    check(p + UNIT, 4 * UNIT, 6);
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    char *way = strstr(argv[1], ":bare");
    if (way) by_instruction = 1, *way = 0;
    if (is(argv[1], "signals")) signals(0);
    else if (is(argv[1], "protects")) signals(1);
    else if (is(argv[1], "sources")) sources();
    else if (is(argv[1], "misplaced")) misplaced();
    else if (begin(), is(argv[1], "before")) before();
    else if (is(argv[1], "streamed")) streamed();
    else if (is(argv[1], "after")) after(0);
    else if (is(argv[1], "by_number")) after(1);
    else return 2;
    puts("right");
}
