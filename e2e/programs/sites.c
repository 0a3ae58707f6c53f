/* Reads into folded memory by system calls of the program's own code. memfold patches such sites
 * when they are used often: each kind is shown to have been patched. A call must change nothing
 * but its result: no vector or mask register, and no byte below the stack pointer, where a small stack of
 * another language may end. Prints "right". */
#include "common.h"

#define LEN (32 * UNIT)

/* `mov $0,%eax; syscall`, which becomes a long jump. In the next three the number is variable: the
 * system call becomes a short jump to the padding behind a return, which is known by the call
 * before it, by instructions before it, or by traps behind it. */
asm(".text\n"
    ".balign 64\n"
    "number: mov $0,%eax\n syscall\n ret\n"
    ".balign 64\n"
    "plain: xor %eax,%eax\n syscall\n ret\n nopw 0(%rax,%rax,1)\n .balign 16\n"
    ".balign 64\n"
    "checked: xor %eax,%eax\n syscall\n nop\n cmp $-4096,%rax\n ja 1f\n ret\n .byte 0x66,0x2e,0x0f,0x1f,0x84,0,0,0,0,0\n"
    ".balign 16\n 1: ret\n"
    ".balign 64\n"
    "trapped: xor %eax,%eax\n syscall\n mov $0,%ecx\n ret\n .fill 12,1,0xcc\n"
    ".balign 64\n nop\n");
/* As glibc's `opendir` opens. It becomes a long jump too. The system call lies in two pages. */
asm(".text\n"
    ".balign 4096\n .fill 4077,1,0xcc\n"
    "opens: mov $0x80000,%edx\n mov $257,%eax\n mov %rdi,%rsi\n"
    "opens_at: mov $0xffffff9c,%edi\n syscall\n ret\n"
    ".balign 64\n nop\n");
extern unsigned char number[], plain[], checked[], trapped[], opens_at[];
extern int opens(const char *path);

/* Each kind, and where its patch begins. */
static const struct site {
    unsigned char *code;
    int patch;
} sites[] = {{number, 0}, {plain, 2}, {checked, 2}, {trapped, 2}};
enum { SITES = sizeof sites / sizeof *sites, BELOW = 4096, VECTORS = 32 * 64, MASKS = 8 * 8, WITH_MASKS = 65 };

static unsigned char *memory;

/* Calls `code` as a function with these arguments, on a stack that begins at `top`. Loads
 * vector registers from `before`, and stores them to `after`: all of `width` 64 or 32 bytes, and the
 * mask registers if it is WITH_MASKS. */
__attribute__((target("avx2,avx512f,avx512bw"), noinline)) static long call_on(const unsigned char *code, char *top, long first, long second, size_t third,
                                                                     const void *before, void *after, int width) {
    register const unsigned char *site asm("r12") = code;
    register const void *in asm("r13") = before;
    register void *out asm("r14") = after;
    register char *stack asm("r15") = top;
    register long wide asm("rbx") = width;
    long result, a = first, b = second, c = third;
    asm volatile("cmp $64, %%ebx; jb 1f\n\t"
                 ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31; vmovdqu64 64*\\n(%%r13), %%zmm\\n; .endr\n\t"
                 "cmp $65, %%ebx; jb 2f; .irp n,0,1,2,3,4,5,6,7; kmovq 64*32+8*\\n(%%r13), %%k\\n; .endr\n\t"
                 "jmp 2f; 1: cmp $32, %%ebx; jb 2f\n\t"
                 ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15; vmovdqu 32*\\n(%%r13), %%ymm\\n; .endr\n\t"
                 "2: xchg %%rsp, %%r15; call *%%r12; xchg %%rsp, %%r15\n\t"
                 "cmp $64, %%ebx; jb 1f\n\t"
                 ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31; vmovdqu64 %%zmm\\n, 64*\\n(%%r14); .endr\n\t"
                 "cmp $65, %%ebx; jb 2f; .irp n,0,1,2,3,4,5,6,7; kmovq %%k\\n, 64*32+8*\\n(%%r14); .endr\n\t"
                 "jmp 2f; 1: cmp $32, %%ebx; jb 2f\n\t"
                 ".irp n,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15; vmovdqu %%ymm\\n, 32*\\n(%%r14); .endr\n\t"
                 "2:"
                 : "=a"(result), "+D"(a), "+S"(b), "+d"(c), "+r"(stack)
                 : "r"(site), "r"(in), "r"(out), "r"(wide)
                 : "rcx", "r11", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",
                   "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "k1", "k2", "k3", "k4", "k5", "k6", "k7");
    return result;
}

/* Calls `code` as `call_on` does, and checks that nothing has changed but the result. */
static long call_site(const unsigned char *code, long first, long second, size_t third) {
    static unsigned char before[VECTORS + MASKS], after[VECTORS + MASKS];
    static char stack[2 * BELOW] __attribute__((aligned(64)));
    int width = __builtin_cpu_supports("avx512f") ? 64 : __builtin_cpu_supports("avx2") ? 32 : 0;
    int compared = width == 64 ? VECTORS : width * 16;
    if (__builtin_cpu_supports("avx512bw")) width = WITH_MASKS, compared = VECTORS + MASKS;
    for (size_t i = 0; i < sizeof before; i++) before[i] = mix(i);
    /* All but the return address of the call. */
    memset(stack, 0x5a, sizeof stack);
    long result = call_on(code, stack + BELOW + 8, first, second, third, before, after, width);
    NEED(memcmp(before, after, compared) == 0);
    for (int i = 0; i < BELOW; i++) NEED(stack[i] == 0x5a);
    return result;
}

static void map_memory(void) {
    memory = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(memory != MAP_FAILED);
    for (size_t i = 0; i < LEN; i += 8) *(uint64_t *)(memory + i) = i % 32 ? i : mix(i);
}

static void reads(void) {
    static unsigned char bytes[PAGE];
    unsigned char first[SITES][8];
    int file = open("/proc/self/exe", O_RDONLY);
    map_memory();
    NEED(file >= 0 && pread(file, bytes, PAGE, 0) == PAGE);
    for (int site = 0; site < SITES; site++) memcpy(first[site], sites[site].code + sites[site].patch, 8);
    for (int round = 0; round < 1000; round++)
        for (int site = 0; site < SITES; site++) {
            unsigned char *to = memory + mix(round * SITES + site) % (LEN / PAGE) * PAGE;
            NEED(lseek(file, 0, SEEK_SET) == 0);
            NEED(call_site(sites[site].code, file, (long)to, PAGE) == PAGE);
            NEED(memcmp(to, bytes, PAGE) == 0);
        }
    for (int site = 0; site < SITES; site++) NEED(memcmp(first[site], sites[site].code + sites[site].patch, 8) != 0);
}

/* The paths are in folded memory. */
static void opens_paths(void) {
    static const char path[] = "/dev/zero";
    unsigned char first = *opens_at;
    map_memory();
    for (size_t i = 0; i < LEN; i += PAGE) memcpy(memory + i, path, sizeof path);
    for (int round = 0; round < 1000; round++) {
        const char *at = (char *)memory + mix(round) % (LEN / PAGE) * PAGE;
        char byte = 1;
        int file = opens(at);
        NEED(file >= 0 && read(file, &byte, 1) == 1 && byte == 0 && close(file) == 0);
        NEED(fcntl(file, F_GETFD) < 0 && memcmp(at, path, sizeof path) == 0);
    }
    NEED(opens("/no/such/path") == -ENOENT && *opens_at != first);
}

int main(int argc, char **argv) {
    static const struct test all[] = {{"reads", reads}, {"opens", opens_paths}};
    return RUN_NAMED(argc, argv, all);
}
