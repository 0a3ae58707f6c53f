/* Kinds of private anonymous memory that no plain mmap makes. All of them are folded. */
#include "common.h"

static const size_t LEN = 40 * UNIT;
static char zeros[40 * UNIT] __attribute__((aligned(4096)));

/* Fills memory, has it folded, and verifies it. The kernel writes to a part that is folded. */
static void fold_and_check(char *p, size_t len, uint64_t seed) {
    static char page[PAGE];
    int ends[2];
    fill(p, len, seed);
    push_out(p, len);
    check(p, len, seed);
    push_out(p, len);
    NEED(pipe(ends) == 0);
    fill_from(page, PAGE, seed + 1, 0);
    NEED(write(ends[1], page, PAGE) == (ssize_t)PAGE && read(ends[0], p, PAGE) == (ssize_t)PAGE);
    check_from(p, PAGE, seed + 1, 0);
    check_from(p + PAGE, len - PAGE, seed, 1);
    close(ends[0]), close(ends[1]);
}

static void statics(void) {
    check_zero(zeros, sizeof zeros);
    fold_and_check(zeros, sizeof zeros, 1);
}

/* A child has the static memory that its parent had folded. */
static void inherited(void) {
    fill(zeros, sizeof zeros, 2);
    push_out(zeros, sizeof zeros);
    pid_t pid = fork();
    if (pid == 0) {
        check(zeros, sizeof zeros, 2);
        fold_and_check(zeros, sizeof zeros, 3);
        _exit(7);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 7);
    check(zeros, sizeof zeros, 2);
}

static void *use_stack(void *arg) {
    char local[64 << 10];
    fill_from(local, sizeof local, 9, 0);
    fold_and_check(arg, LEN, 4);
    check_from(local, sizeof local, 9, 0);
    return NULL;
}

static void stacks(void) {
    char *p = map_at(NULL, LEN, MAP_STACK);
    fold_and_check(p, LEN, 4);
    pthread_t thread;
    NEED(!pthread_create(&thread, NULL, use_stack, p) && !pthread_join(thread, NULL));
}

static int is_marked(const char *address, const char *flag) {
    FILE *smaps = fopen("/proc/self/smaps", "r");
    NEED(smaps);
    char line[512];
    unsigned long start, end;
    int inside = 0, has = 0;
    while (fgets(line, sizeof line, smaps)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) inside = start <= (uintptr_t)address && (uintptr_t)address < end;
        if (inside && !strncmp(line, "VmFlags:", 8)) has = strstr(line, flag) != NULL;
    }
    fclose(smaps);
    return has;
}

static void mergeable(void) {
    char *p = map(LEN);
    if (madvise(p, LEN, MADV_MERGEABLE) != 0) {
        /* This kernel has no KSM. */
        NEED(errno == EINVAL);
    } else {
        NEED(madvise((void *)8, PAGE, MADV_MERGEABLE) == -1 && errno == EINVAL);
        NEED(madvise((void *)(2 * PAGE), PAGE, MADV_MERGEABLE) == -1 && errno == ENOMEM);
    }
    fold_and_check(p, LEN, 5);
    NEED(!is_marked(p, " mg"));
}

/* Memory grows downwards before and after it was folded. The kernel bounds such memory as it does
 * the stack, by 8 MiB. */
static void growing(void) {
    const size_t len = 12 * UNIT, step = 16 * PAGE;
    filler = map(48 * UNIT);
    char *p = map_at(NULL, len, MAP_GROWSDOWN);
    fill_from(p - step, step, 6, 0);
    fold_and_check(p + PAGE, len - PAGE, 6);
    fill_from(p - 2 * step, step, 7, 0);
    check_from(p - 2 * step, step, 7, 0);
    check_from(p - step, step, 6, 0);
}

static void zero_device(void) {
    int fd = open("/dev/zero", O_RDWR);
    NEED(fd >= 0);
    char *p = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
    NEED(p != MAP_FAILED);
    close(fd);
    check_zero(p, LEN);
    fold_and_check(p, LEN, 8);
}

/* Areas of 32 KiB, with inaccessible pages between them. */
static void small(void) {
    enum { AREA = 8, ALL = 640 };
    static char *areas[ALL];
    for (int i = 0; i < ALL; i++) {
        areas[i] = mmap(NULL, (AREA + 1) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        NEED(areas[i] != MAP_FAILED && mprotect(areas[i], AREA * PAGE, PROT_READ | PROT_WRITE) == 0);
        fill_from(areas[i], AREA * PAGE, 10, i * AREA);
    }
    size_t left = ALL * AREA;
    for (int round = 0; round < 100 && left > ALL * AREA / 2; round++) {
        if (!filler) filler = map(48 * UNIT);
        fill(filler, 48 * UNIT, round);
        left = 0;
        for (int i = 0; i < ALL; i++) left += present(areas[i], AREA * PAGE);
    }
    NEED(left <= ALL * AREA / 2);
    for (int i = 0; i < ALL; i++) check_from(areas[i], AREA * PAGE, 10, i * AREA);
}

int main(int argc, char **argv) {
    struct test all[] = {
        {"statics", statics},         {"inherited", inherited}, {"stacks", stacks}, {"mergeable", mergeable}, {"growing", growing},
        {"zero_device", zero_device}, {"small", small},
    };
    return RUN_NAMED(argc, argv, all);
}
