/* A program that defines functions of libc itself and makes the calls by libc's `syscall`, as
 * allocators with hooks do. */
#include "common.h"

void *mmap(void *at, size_t len, int access, int flags, int fd, off_t offset) {
    return (void *)syscall(SYS_mmap, at, len, access, flags, fd, offset);
}
int munmap(void *at, size_t len) { return syscall(SYS_munmap, at, len); }
int madvise(void *at, size_t len, int advice) { return syscall(SYS_madvise, at, len, advice); }
int mprotect(void *at, size_t len, int access) { return syscall(SYS_mprotect, at, len, access); }
int mlock(const void *at, size_t len) { return syscall(SYS_mlock, at, len); }

static const size_t LEN = 40 * UNIT;

static void calls(int is_folded) {
    char *p = map(LEN);
    fill(p, LEN, 1);
    if (is_folded) push_out(p, LEN);
    NEED(madvise(p, 2 * UNIT, MADV_DONTNEED) == 0);
    NEED(mprotect(p + 2 * UNIT, UNIT, PROT_READ) == 0);
    NEED(mlock(p + 4 * UNIT, PAGE) == 0);
    if (is_folded) push_out(p, LEN);
    check_zero(p, 2 * UNIT);
    check_from(p + 2 * UNIT, LEN - 2 * UNIT, 1, 2 * UNIT / PAGE);
    NEED(munmap(p, LEN) == 0);
}
static void folded(void) { calls(1); }
static void plain(void) { calls(0); }

int main(int argc, char **argv) {
    static const struct test all[] = {{"folded", folded}, {"plain", plain}};
    return RUN_NAMED(argc, argv, all);
}
