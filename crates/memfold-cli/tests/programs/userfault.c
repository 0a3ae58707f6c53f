/* A program with a userfaultfd of its own: what it serves stays its own, whether it registers it before memfold has taken it or
   after, and every byte is right in that and around it. */
#include "bare.h"
#include <linux/userfaultfd.h>

#define LEN (48 * MIB)
#define OWN (20 * MIB)
#define OWN_LEN (2 * MIB)

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

static void begin(void) {
    struct uffdio_api api = {.api = UFFD_API};
    pthread_t thread;
    uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
    /* Without a privilege it serves the program's own touches only, and there are no others. */
    if (uffd < 0 && errno == EPERM) uffd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    NEED(uffd >= 0 && !ioctl(uffd, UFFDIO_API, &api));
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

static void after(int by_number) {
    char *p = map(LEN);
    fill(p, LEN, 3);
    check(p, LEN, 3);
    register_own(p, by_number);
    check(p, LEN, 3); /* What was there stays. */
    NEED(!madvise(p + OWN, OWN_LEN, MADV_DONTNEED));
    use(p);
}

int main(int argc, char **argv) {
    NEED(argc == 2);
    begin();
    if (is(argv[1], "before")) before();
    else if (is(argv[1], "after")) after(0);
    else if (is(argv[1], "by_number")) after(1);
    else if (is(argv[1], "before:bare")) by_instruction = 1, before();
    else if (is(argv[1], "after:bare")) by_instruction = 1, after(0);
    else return 2;
    puts("right");
}
