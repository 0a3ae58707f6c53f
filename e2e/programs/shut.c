/* Processes that remove their own privileges, files, descriptors or system calls, and then fork. */
#include "common.h"
#include "filtered.h"
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sysinfo.h>

static const size_t LEN = 64 * UNIT;
static char *memory, *closed, *constant;

/* Counts resident pages where /proc is unavailable. Nothing is swapped out by the kernel here. */
static size_t resident(char *at, size_t len) {
    static unsigned char there[64 * UNIT / PAGE];
    size_t n = 0;
    NEED(len <= 64 * UNIT && mincore(at, len, there) == 0);
    for (size_t i = 0; i < len / PAGE; i++) n += there[i] & 1;
    return n * PAGE;
}

static void folded(void) {
    memory = map(LEN);
    closed = map(2 * UNIT);
    constant = map(2 * UNIT);
    fill(closed, 2 * UNIT, 2);
    fill(constant, 2 * UNIT, 3);
    fill(memory, LEN, 1);
    push_out(memory, LEN);
    NEED(mprotect(closed, 2 * UNIT, PROT_NONE) == 0);
    NEED(mprotect(constant, 2 * UNIT, PROT_READ) == 0);
}

/* A child changes its memory, and checks whether it is still folded. */
static void live(int is_managed) {
    check(memory, LEN, 1);
    check(constant, 2 * UNIT, 3);
    NEED(mprotect(closed, 2 * UNIT, PROT_READ | PROT_WRITE) == 0);
    check(closed, 2 * UNIT, 2);
    char *more = map(LEN);
    fill(more, LEN, 4);
    NEED(madvise(more + UNIT, UNIT, MADV_DONTNEED) == 0);
    char *moved = mremap(more, LEN, LEN + UNIT, MREMAP_MAYMOVE);
    NEED(moved != MAP_FAILED);
    fill_from(moved + UNIT, UNIT, 4, UNIT / PAGE);
    fill_from(moved + LEN, UNIT, 4, LEN / PAGE);
    fill(memory, LEN, 5);
    check(moved, LEN + UNIT, 4);
    char *heap = malloc(9 * UNIT);
    NEED(heap);
    memset(heap, 7, 9 * UNIT);
    check(memory, LEN, 5);
    for (size_t i = 0; i < 9 * UNIT; i++) NEED(heap[i] == 7);
    /* At most 16 units of it may be resident. */
    if (is_managed) NEED(resident(memory, LEN) + resident(moved, LEN) < 40 * UNIT);
}

static void once(int is_managed) {
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        pid_t grandchild = fork();
        NEED(grandchild >= 0);
        live(is_managed);
        if (grandchild == 0) _exit(6);
        NEED(WEXITSTATUS(wait_for(grandchild)) == 6);
        _exit(5);
    }
    check(memory, LEN, 1);
    int status = wait_for(pid);
    NEED(WIFEXITED(status) && WEXITSTATUS(status) == 5);
    check(memory, LEN, 1);
    check(constant, 2 * UNIT, 3);
    NEED(mprotect(closed, 2 * UNIT, PROT_READ) == 0);
    check(closed, 2 * UNIT, 2);
}

static void twice(int is_managed) {
    once(is_managed);
    NEED(mprotect(closed, 2 * UNIT, PROT_NONE) == 0);
    once(is_managed);
}

static void become_nobody(void) { NEED(setgid(65534) == 0 && setuid(65534) == 0); }

static void set_user(int is_managed) {
    folded();
    become_nobody();
    twice(is_managed);
}

static void after_setuid(void) { set_user(1); }

static void undumped(int is_managed) {
    folded();
    NEED(prctl(PR_SET_DUMPABLE, 0) == 0);
    twice(is_managed);
}

static void not_dumpable(void) { undumped(1); }

/* Without a userfaultfd the child needs /proc/self/mem. */
static void not_dumpable_in_memory(void) { undumped(0); }
static void after_setuid_in_memory(void) { set_user(0); }

static void shut_in(void) {
    char directory[] = "/tmp/memfold-shut-XXXXXX";
    NEED(mkdtemp(directory) && chdir(directory) == 0 && rmdir(directory) == 0 && chroot(".") == 0);
}

static void in_an_empty_root(void) {
    folded();
    shut_in();
    once(1);
    become_nobody();
    once(1);
}

static void without_proc(void) {
    folded();
    NEED(unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
    NEED(umount2("/proc", MNT_DETACH) == 0 && access("/proc/self", F_OK) < 0);
    twice(1);
}

/* Folds memory. */
static void grow(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    for (int i = 0; i < 1000 && resident(memory, LEN) > 40 * UNIT; i++) {
        fill_from(memory, 16 * UNIT, 1, 0);
        usleep(5000);
    }
    NEED(resident(memory, LEN) <= 40 * UNIT);
    check(memory, LEN, 1);
}

/* Nothing was folded yet. */
static void small(void) {
    shut_in();
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        grow();
        _exit(5);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 5);
    grow();
}

/* All descriptor numbers are in use. */
static void no_descriptor_left(void) {
    folded();
    while (dup(0) >= 0);
    NEED(errno == EMFILE);
    twice(1);
}

/* The child can't be managed, so it loads all its memory. */
static void filtered(void) {
    folded();
    become_nobody();
    NEED(prctl(PR_SET_DUMPABLE, 1) == 0);
    NEED(forbid(SYS_userfaultfd) == 0);
    twice(0);
}

/* Where huge pages are wanted, the kernel maps many zeros for a touch of one missing page. */
static void filtered_with_huge_pages(void) {
    folded();
    NEED(madvise(memory, LEN, MADV_HUGEPAGE) == 0);
    become_nobody();
    NEED(prctl(PR_SET_DUMPABLE, 1) == 0);
    NEED(forbid(SYS_userfaultfd) == 0);
    twice(0);
}

static void filtered_in_an_empty_root(void) {
    struct sysinfo about;
    folded();
    shut_in();
    become_nobody();
    NEED(forbid(SYS_userfaultfd) == 0);
    NEED(sysinfo(&about) == 0);
    /* With swap, such a child can't find out what the kernel has swapped out, so memfold ends
     * it. */
    if (!about.totalswap) twice(0);
}

static void filtered_small(void) {
    shut_in();
    become_nobody();
    NEED(forbid(SYS_userfaultfd) == 0);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        memory = map(LEN);
        fill(memory, LEN, 1);
        check(memory, LEN, 1);
        _exit(5);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 5);
    grow();
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"setuid", after_setuid},       {"dumpable", not_dumpable},    {"root", in_an_empty_root},
        {"proc", without_proc},         {"small", small},              {"descriptors", no_descriptor_left},
        {"filter", filtered},           {"filter_root", filtered_in_an_empty_root},
        {"filter_small", filtered_small}, {"dumpable_memory", not_dumpable_in_memory},
        {"filter_huge", filtered_with_huge_pages}, {"setuid_memory", after_setuid_in_memory},
    };
    return RUN_NAMED(argc, argv, all);
}
