/* Makes mremaps of ranges that consist of several mappings, or of one. Prints the result of each,
 * and then what each page around it allows and holds. The output must not depend on memfold. */
#include "common.h"
#include <setjmp.h>

#define SOURCE ((char *)0x1000000000)
#define TARGET (SOURCE + ROOM * PART)
/* Lengths are in parts of so many bytes. */
#define PART (4 * PAGE)
#define ROOM 64ul
#define SEGMENT 8

/* Each letter is a segment of SEGMENT parts:
 * w folded, W resident, z never touched, r read-only, n without access, d kept out of core dumps,
 * k kept from children, s shared, l locked, . a gap. Neighbours that are alike are one mapping. */
static const char *const layouts[] = {
    "www", "wW.", "Wzw", "zzz", "wr", "rw", "wrw", "wn", "nw", "Wr", "wd", "dw", "w.w", ".ww", "ww.", "rr.", "nnn",
    "ws", "sw", "sss", "wl", "lw", "wrn", "dwd", "rnw", "ww", "w", "zr", "rz", "zd",
    "wk", "kw", "kk",
};

/* Offsets and lengths in parts. */
static const struct op {
    int start, old, new, flags;
} ops[] = {
#define MOVE MREMAP_MAYMOVE
#define TO (MREMAP_MAYMOVE | MREMAP_FIXED)
#define KEEP (MREMAP_MAYMOVE | MREMAP_DONTUNMAP)
    {0, 16, 4, 0},    {0, 16, 8, 0},     {0, 16, 12, 0},    {0, 16, 16, 0},    {0, 16, 20, 0},    {0, 16, 24, 0},
    {0, 24, 32, 0},   {0, 16, 16, MOVE}, {0, 16, 40, MOVE}, {0, 24, 40, MOVE}, {0, 16, 12, MOVE}, {0, 8, 40, MOVE},
    {0, 16, 16, TO},  {0, 24, 24, TO},   {0, 16, 4, TO},    {0, 16, 8, TO},    {0, 16, 12, TO},   {0, 16, 24, TO},
    {0, 16, 16, KEEP}, {0, 16, 16, TO | KEEP}, {0, 8, 8, KEEP}, {4, 8, 8, TO}, {4, 8, 4, TO},     {4, 8, 12, MOVE},
    {4, 8, 6, 0},     {8, 8, 8, TO},     {8, 8, 16, 0},     {8, 16, 24, MOVE}, {12, 12, 2, TO},   {0, 0, 8, MOVE},
    {4, 16, 16, TO},  {0, 24, 12, TO},   {0, 40, 40, TO},   {0, 40, 4, 0},     {0, 40, 4, TO},    {0, 40, 48, MOVE},
};

static sigjmp_buf back;
static volatile int code;
static void on_fault(int number, siginfo_t *info, void *context) {
    (void)number, (void)context;
    code = info->si_code;
    siglongjmp(back, 1);
}

/* Returns what a page allows: w, r, n (nothing), or - where there is none. Sets its first byte. */
static char page_at(volatile unsigned char *at, int *byte) {
    *byte = 0;
    if (sigsetjmp(back, 1)) return code == SEGV_ACCERR ? 'n' : '-';
    *byte = *at;
    if (sigsetjmp(back, 1)) return 'r';
    *at = *byte;
    return 'w';
}

static void show(const char *name, char *from, size_t parts) {
    printf(" %s:", name);
    for (size_t p = 0; p < parts; p++) {
        int first, last;
        char access = page_at((unsigned char *)from + p * PART, &first);
        char end = page_at((unsigned char *)from + (p + 1) * PART - 1, &last);
        if (access != end || first != last) printf("MIXED");
        if (access == '-') putchar('-');
        else printf("%c%02x", access, first);
    }
}

/* Maps a segment for each letter and fills it. The pages of one letter are mapped by one call. */
static void lay(char *at, const char *layout, int first) {
    size_t bytes = SEGMENT * PART;
    for (size_t i = 0; layout[i]; i++) {
        int flags = MAP_FIXED | MAP_ANONYMOUS | (layout[i] == 's' ? MAP_SHARED : MAP_PRIVATE);
        if (layout[i] != '.') NEED(mmap(at + i * bytes, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == at + i * bytes);
    }
    for (size_t i = 0; layout[i]; i++)
        if (!strchr(".z", layout[i]))
            for (size_t p = 0; p < SEGMENT; p++) memset(at + i * bytes + p * PART, first + i * SEGMENT + p, PART);
    for (size_t i = 0; layout[i]; i++) {
        char *part = at + i * bytes;
        if (strchr("wdrnk", layout[i])) NEED(!madvise(part, bytes, MADV_PAGEOUT));
        if (layout[i] == 'd') NEED(!madvise(part, bytes, MADV_DONTDUMP));
        if (layout[i] == 'k') NEED(!madvise(part, bytes, MADV_DONTFORK));
        if (layout[i] == 'r') NEED(!mprotect(part, bytes, PROT_READ));
        if (layout[i] == 'n') NEED(!mprotect(part, bytes, PROT_NONE));
        if (layout[i] == 'l') NEED(!mlock(part, bytes));
    }
}

static void one(const char *layout, const struct op *op, const char *target) {
    NEED(!munmap(SOURCE, 2 * ROOM * PART));
    lay(SOURCE, layout, 1);
    lay(TARGET, target, 0x80);
    char *from = SOURCE + op->start * PART;
    char *at = mremap(from, op->old * PART, op->new * PART, op->flags, TARGET);
    printf("%s %d %d->%d %x to %s: ", layout, op->start, op->old, op->new, op->flags, target);
    int is_away = 0;
    if (at == MAP_FAILED) printf("errno %d", errno);
    else if (at == from) printf("stays");
    else if (at == TARGET) printf("target");
    else printf("away"), is_away = 1;
    show("source", SOURCE, ROOM);
    show("target", TARGET, ROOM);
    if (is_away) {
        show("away", at, op->new);
        NEED(!munmap(at, op->new * PART));
    }
    putchar('\n');
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_NODEFER};
    NEED(!sigaction(SIGSEGV, &action, NULL) && !sigaction(SIGBUS, &action, NULL));
    setvbuf(stdout, NULL, _IOLBF, 0);
    fill(map(16 * MIB), 16 * MIB, 1);
    for (size_t l = 0; l < sizeof layouts / sizeof *layouts; l++)
        for (size_t o = 0; o < sizeof ops / sizeof *ops; o++) {
            one(layouts[l], &ops[o], "");
            if (ops[o].flags & MREMAP_FIXED) one(layouts[l], &ops[o], "wWw");
        }
    return 0;
}
