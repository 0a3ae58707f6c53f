/* A program with a userfaultfd that reports fork, move, discard and unmapping of its memory. The
 * kernel blocks the caller until a thread of the program has read the event. That thread touches
 * folded memory, maps memory, starts threads and signals itself before it reads. */
#include "bare.h"
#include <linux/userfaultfd.h>
#include <poll.h>

#define LEN (48 * UNIT)
#define OWN (1 * UNIT)

static int uffd, copy_uffd = -1;
static char *memory, *own;
static volatile int events[32], over;
static char served[PAGE] __attribute__((aligned(4096)));

static void on_signal(int signal) { (void)signal; }
static void *nothing(void *arg) { return arg; }

/* Makes calls that take locks of many kinds. */
static void be_busy(uint64_t turn) {
    uint64_t page = mix(turn) % (LEN / PAGE);
    check_from(memory + page * PAGE, PAGE, 3, page);
    char *p = (map_at)(NULL, 256 << 10, 0);
    p[5] = 1;
    NEED(!(madvise)(p, 256 << 10, MADV_DONTNEED) && !p[5] && !munmap(p, 256 << 10));
    struct sigaction action = {.sa_handler = on_signal};
    NEED(!sigaction(SIGUSR2, &action, NULL) && !raise(SIGUSR2));
    pthread_t thread;
    if (turn % 8 == 0) NEED(!pthread_create(&thread, NULL, nothing, NULL) && !pthread_join(thread, NULL));
}

static void answer(int fd, struct uffd_msg *message) {
    events[message->event]++;
    if (message->event == UFFD_EVENT_PAGEFAULT) {
        struct uffdio_copy copy = {.dst = message->arg.pagefault.address & ~(PAGE - 1), .src = (uintptr_t)served, .len = PAGE};
        NEED(!(ioctl)(fd, UFFDIO_COPY, &copy) || errno == EEXIST || errno == ENOENT || errno == EAGAIN || errno == ESRCH);
    } else if (message->event == UFFD_EVENT_FORK) {
        if (copy_uffd >= 0) close(copy_uffd);
        copy_uffd = message->arg.fork.ufd;
    }
}

/* Works before it reads each event. */
static void *serve(void *unused) {
    struct uffd_msg message;
    for (uint64_t turn = 1; !over; turn++) {
        struct pollfd all[] = {{uffd, POLLIN, 0}, {copy_uffd, POLLIN, 0}};
        if (poll(all, 2, 1) <= 0) continue;
        be_busy(turn);
        for (int i = 0; i < 2; i++)
            while (all[i].fd >= 0 && all[i].revents & POLLIN && read(all[i].fd, &message, sizeof message) == sizeof message) answer(all[i].fd, &message);
    }
    return unused;
}

static void register_own(void) {
    struct uffdio_register range = {.range = {(uintptr_t)own, OWN}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    NEED(!(ioctl)(uffd, UFFDIO_REGISTER, &range));
}

static pthread_t server;
static void begin(void) {
    uint64_t features = UFFD_FEATURE_EVENT_FORK | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE | UFFD_FEATURE_EVENT_UNMAP;
    struct uffdio_api api = {.api = UFFD_API, .features = features};
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
    /* EVENT_FORK needs a privilege. */
    if (uffd < 0 || (ioctl)(uffd, UFFDIO_API, &api)) {
        api.features &= ~UFFD_FEATURE_EVENT_FORK;
        if (uffd >= 0) close(uffd);
        uffd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | UFFD_USER_MODE_ONLY);
        NEED(uffd >= 0 && !(ioctl)(uffd, UFFDIO_API, &api));
    }
    memset(served, 77, PAGE);
    memory = map(LEN);
    own = map(OWN);
    fill(memory, LEN, 3);
    push_out(memory, LEN);
    register_own();
    NEED(!pthread_create(&server, NULL, serve, NULL));
    if (!(api.features & UFFD_FEATURE_EVENT_FORK)) events[UFFD_EVENT_FORK] = -1;
}

static void end(void) {
    over = 1;
    NEED(!pthread_join(server, NULL));
    check(memory, LEN, 3);
}

/* A child's memory is its own, its faults are served, and it can fork too. */
static void forks(void) {
    begin();
    int told = events[UFFD_EVENT_FORK] >= 0;
    for (int i = 0; i < 25; i++) {
        NEED(own[i * PAGE] == 77);
        /* libc's fork function would hold libc's locks during the call. */
        pid_t pid = i % 5 == 4 ? vfork() : syscall(SYS_fork);
        if (!pid && i % 5 == 4) _exit(0);
        if (!pid) {
            for (uint64_t k = 0, at = i; k < 40; k++) at = mix(at), check_from(memory + at % (LEN / PAGE) * PAGE, PAGE, 3, at % (LEN / PAGE));
            fill(memory + 4 * UNIT, UNIT, i);
            check(memory + 4 * UNIT, UNIT, i);
            NEED(own[i * PAGE] == 77 && (!told || own[(i + 100) * PAGE] == 77));
            _exit(0);
        }
        NEED(!wait_for(pid));
    }
    spawn_and_system();
    NEED(!told || events[UFFD_EVENT_FORK] >= 20);
    end();
}

static void changes(void) {
    begin();
    for (int i = 0; i < 40; i++) {
        NEED(own[i * PAGE] == 77);
        NEED(!(madvise)(own, OWN / 2, MADV_DONTNEED) && own[i * PAGE] == 77);
        char *moved = (mremap)(own, OWN, OWN, MREMAP_MAYMOVE | MREMAP_FIXED, (map_at)(NULL, OWN, 0));
        NEED(moved != MAP_FAILED && moved[i * PAGE] == 77);
        if (i % 4 == 0) NEED((map_at)(moved, OWN, MAP_FIXED) == moved);
        if (i % 4 == 1) NEED(!munmap(moved, OWN / 2) && !munmap(moved + OWN / 2, OWN / 2) && (moved = (map_at)(NULL, OWN, 0)));
        if (i % 4 == 2) NEED(!(madvise)(moved, OWN, MADV_FREE));
        if (i % 4 == 3) NEED(!munmap(moved, OWN) && (moved = (map_at)(NULL, OWN, 0)));
        own = moved;
        if (i % 4 != 2) register_own();
    }
    NEED(events[UFFD_EVENT_REMAP] >= 40 && events[UFFD_EVENT_REMOVE] >= 40 && events[UFFD_EVENT_UNMAP] >= 20);
    end();
}

/* Some parts of each changed range are folded, and others report events. */
static void mixed(void) {
    begin();
    int file = open("/proc/self/exe", O_RDONLY);
    for (int i = 0; i < 24; i++) {
        char *heap = sbrk(0), *all = (map_at)(NULL, 3 * OWN, 0), *moved = (map_at)(NULL, OWN, 0);
        if (i % 6 == 5) {
            munmap(all, 3 * OWN);
            NEED(sbrk(4 * OWN) == heap);
            all = (char *)(((uintptr_t)heap + PAGE - 1) & ~(PAGE - 1));
        }
        fill(all, OWN, i), fill(all + 2 * OWN, OWN, i), fill(moved, OWN, i);
        own = all + OWN;
        register_own();
        NEED(!(madvise)(own, OWN, MADV_DONTNEED) && own[0] == 77);
        check(all, OWN, i), check(all + 2 * OWN, OWN, i);
        switch (i % 6) {
        case 0:
            NEED(!munmap(all, 3 * OWN));
            continue;
        case 1:
            NEED(!(madvise)(all, 3 * OWN, MADV_DONTNEED) && own[PAGE] == 77);
            check_zero(all, OWN), check_zero(all + 2 * OWN, OWN);
            break;
        case 2:
            NEED((map_at)(all, 3 * OWN, MAP_FIXED) == all);
            check_zero(all, 3 * OWN);
            break;
        case 3: NEED(mmap(all, 3 * OWN, PROT_READ, MAP_PRIVATE | MAP_FIXED, file, 0) == all && !memcmp(all, "\177ELF", 4)); break;
        case 4:
            NEED((mremap)(moved, OWN, OWN, MREMAP_MAYMOVE | MREMAP_FIXED, own) == own);
            check(all, OWN, i), check(own, OWN, i), check(all + 2 * OWN, OWN, i);
            break;
        case 5:
            NEED(!brk(heap) && sbrk(4 * OWN) == heap);
            check_zero(all, 3 * OWN);
            NEED(!brk(heap));
            continue;
        }
        NEED(!munmap(all, 3 * OWN));
    }
    NEED(events[UFFD_EVENT_UNMAP] >= 12 && events[UFFD_EVENT_REMOVE] >= 24);
    end();
}

int main(int argc, char **argv) {
    static const struct test all[] = {{"forks", forks}, {"changes", changes}, {"mixed", mixed}};
    return RUN_NAMED(argc, argv, all);
}
