/* Makes the calls below by libc's function or, in a test whose name ends with ":bare", by an
 * instruction of the program's own, as Go and Rust programs do. */
#include "common.h"
#include <sys/ioctl.h>

static long instruct(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = -result;
        return -1;
    }
    return result;
}

#define CALL6(number, a, b, c, d, e, f, ...) instruct(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define EITHER(name, ...) (by_instruction ? CALL6(SYS_##name, __VA_ARGS__, 0, 0, 0, 0, 0, 0) : (long)name(__VA_ARGS__))
#define madvise(...) EITHER(madvise, __VA_ARGS__)
#define mlock(...) EITHER(mlock, __VA_ARGS__)
#define mlock2(...) EITHER(mlock2, __VA_ARGS__)
#define mlockall(...) EITHER(mlockall, __VA_ARGS__)
#define munlock(...) EITHER(munlock, __VA_ARGS__)
#define munlockall() (by_instruction ? instruct(SYS_munlockall, 0, 0, 0, 0, 0, 0) : (long)munlockall())
#define mremap(...) ((void *)EITHER(mremap, __VA_ARGS__))
#define ioctl(...) EITHER(ioctl, __VA_ARGS__)
#define vmsplice(...) EITHER(vmsplice, __VA_ARGS__)
#define setsockopt(...) EITHER(setsockopt, __VA_ARGS__)
#define map_at(at, len, flags) \
    (by_instruction ? (void *)instruct(SYS_mmap, (long)(at), len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (flags), -1, 0) \
                    : (map_at)(at, len, flags))
