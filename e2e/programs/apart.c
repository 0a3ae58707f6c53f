/* Memory with MADV_DONTFORK is folded like any other, and is absent in a child of fork. */
#include "common.h"

static const size_t LEN = 32 * UNIT;
static char *common_part, *own;

static pid_t raw_fork(void) { return syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }

static void need_gone(char *at, size_t len) {
    static unsigned char there[32 * UNIT / PAGE];
    for (size_t page = 0; page < len; page += 7 * PAGE) NEED(mincore(at + page, PAGE, there) == -1 && errno == ENOMEM);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) _exit(*(volatile char *)(at + len / 2) & 1);
    int status = wait_for(pid);
    NEED(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    /* System calls return the errors of a plain process: EBADF comes before EFAULT. */
    NEED(write(-1, at, 10) == -1 && errno == EBADF);
    int ends[2];
    NEED(pipe(ends) == 0 && write(ends[1], at, 10) == -1 && errno == EFAULT);
    close(ends[0]), close(ends[1]);
}

/* Pushes out most of what was touched before. If the range is larger than the resident limit,
 * the program can wait for that. A part of a smaller range may stay resident as long as nothing
 * else is touched twice. */
static void push(char *at, size_t len) {
    if (len >= LEN) return push_out(at, len);
    for (int round = 0; round < 3; round++) fill(filler, 48 * UNIT, round);
}

/* In a child: nothing is mapped there, and new memory can be mapped. */
static void be_child(char *gone, size_t len, uint64_t seed) {
    check(common_part, LEN, seed);
    need_gone(gone, len);
    char *new = mmap(gone, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    NEED(new == gone);
    check_zero(new, len);
    fill(new, len, seed + 50);
    push(new, len);
    pid_t pid = fork();
    NEED(pid >= 0);
    check(new, len, seed + 50);
    check(common_part, LEN, seed);
    if (pid == 0) _exit(3);
    NEED(WEXITSTATUS(wait_for(pid)) == 3);
    fill(common_part, LEN, seed + 1);
    push_out(common_part, LEN);
    check(common_part, LEN, seed + 1);
    _exit(4);
}

static void need_apart(pid_t (*copy)(void), char *gone, size_t len, uint64_t seed) {
    pid_t pid = copy();
    NEED(pid >= 0);
    if (pid == 0) be_child(gone, len, seed);
    NEED(WEXITSTATUS(wait_for(pid)) == 4);
}

static void prepare(void) {
    common_part = map(LEN);
    own = map(LEN);
    fill(common_part, LEN, 1);
}

/* Marks the memory before it is first folded, and again after. */
static void marked(void) {
    prepare();
    NEED(madvise(own, LEN, MADV_DONTFORK) == 0);
    fill(own, LEN, 2);
    push_out(own, LEN);
    need_apart(fork, own, LEN, 1);
    need_apart(raw_fork, own, LEN, 1);
    check(own, LEN, 2);
    push_out(own, LEN);
    /* Clears the mark, and then sets it twice. */
    NEED(madvise(own, LEN, MADV_DOFORK) == 0);
    pid_t pid = fork();
    NEED(pid >= 0);
    check(own, LEN, 2);
    check(common_part, LEN, 1);
    if (pid == 0) _exit(5);
    NEED(WEXITSTATUS(wait_for(pid)) == 5);
    push_out(own, LEN);
    NEED(madvise(own, LEN, MADV_DONTFORK) == 0 && madvise(own, LEN, MADV_DONTFORK) == 0);
    need_apart(fork, own, LEN, 1);
    NEED(madvise(own, LEN, MADV_DOFORK) == 0);
    push_out(own, LEN);
    check(own, LEN, 2);
}

/* Marks parts of one mapping. */
static void parts(void) {
    prepare();
    fill(own, LEN, 2);
    push_out(own, LEN);
    size_t from = 3 * UNIT + 5 * PAGE, len = 9 * UNIT + PAGE, to = from + len;
    NEED(madvise(own + UNIT, LEN - 2 * UNIT, MADV_DONTFORK) == 0);
    NEED(madvise(own, from, MADV_DOFORK) == 0 && madvise(own + to, LEN - to, MADV_DOFORK) == 0);
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        check_from(own, from, 2, 0);
        check_from(own + to, LEN - to, 2, to / PAGE);
        if (pid == 0) be_child(own + from, len, 1);
        check(own, LEN, 2);
        NEED(WEXITSTATUS(wait_for(pid)) == 4);
        push_out(own, LEN);
    }
    check(own, LEN, 2);
}

/* mremap moves the mark with the memory. The mark also covers the grown part. */
static void moved(void) {
    prepare();
    fill(own, LEN, 2);
    NEED(madvise(own, LEN, MADV_DONTFORK) == 0);
    push_out(own, LEN);
    char *place = map(2 * LEN);
    NEED(mremap(own, LEN, LEN + 4 * UNIT, MREMAP_MAYMOVE | MREMAP_FIXED, place) == place);
    NEED(munmap(place + LEN + 4 * UNIT, LEN - 4 * UNIT) == 0);
    fill_from(place + LEN, 4 * UNIT, 2, LEN / PAGE);
    push_out(place, LEN);
    need_apart(fork, place, LEN + 4 * UNIT, 1);
    check(place, LEN + 4 * UNIT, 2);
    NEED(mremap(place, LEN + 4 * UNIT, LEN / 2, 0) == place);
    need_apart(fork, place, LEN / 2, 1);
    check(place, LEN / 2, 2);
    /* New memory at the old address has no mark. */
    char *other = map_at(own, LEN, MAP_FIXED_NOREPLACE);
    fill(other, LEN, 3);
    push_out(other, LEN);
    pid_t pid = fork();
    NEED(pid >= 0);
    check(other, LEN, 3);
    if (pid == 0) be_child(place, LEN / 2, 1);
    NEED(WEXITSTATUS(wait_for(pid)) == 4);
    /* New memory that replaces marked memory has no mark either. */
    NEED(munmap(place, LEN / 2) == 0);
    char *new = map_at(place, LEN / 2, MAP_FIXED_NOREPLACE);
    fill(new, LEN / 2, 4);
    push(new, LEN / 2);
    NEED((pid = fork()) >= 0);
    check(new, LEN / 2, 4);
    check(other, LEN, 3);
    if (pid == 0) _exit(6);
    NEED(WEXITSTATUS(wait_for(pid)) == 6);
    /* With MREMAP_DONTUNMAP the source stays mapped, and keeps its mark. */
    NEED(madvise(new, LEN / 2, MADV_DONTFORK) == 0);
    char *target = mremap(new, LEN / 2, LEN / 2, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
    NEED(target != MAP_FAILED);
    fill(new, LEN / 2, 5);
    push(new, LEN / 2);
    need_apart(fork, new, LEN / 2, 1);
    need_apart(fork, target, LEN / 2, 1);
    check(new, LEN / 2, 5);
    check(target, LEN / 2, 4);
}

static volatile int stop;
static void *mark(void *arg) {
    for (uint64_t at = 1; !stop; at = mix(at)) {
        size_t page = at % (LEN / PAGE - 64), len = (1 + at % 63) * PAGE;
        NEED(madvise(own + page * PAGE, len, at >> 60 & 1 ? MADV_DONTFORK : MADV_DOFORK) == 0);
    }
    return NULL;
}

/* One thread sets and clears marks while others fork. In a child a page has its bytes or is
 * absent. */
static void racing(void) {
    prepare();
    fill(own, LEN, 2);
    push_out(own, LEN);
    pthread_t thread[2];
    for (int i = 0; i < 2; i++) NEED(!pthread_create(&thread[i], NULL, mark, NULL));
    for (int round = 0; round < 15; round++) {
        pid_t pid = fork();
        NEED(pid >= 0);
        if (pid == 0) {
            unsigned char there;
            size_t seen = 0;
            for (size_t page = 0; page < LEN / PAGE; page++)
                if (mincore(own + page * PAGE, PAGE, &there) == 0) check_from(own + page * PAGE, PAGE, 2, page), seen++;
            check(common_part, LEN, 1);
            NEED(seen > 0);
            _exit(3);
        }
        NEED(WEXITSTATUS(wait_for(pid)) == 3);
    }
    stop = 1;
    for (int i = 0; i < 2; i++) NEED(!pthread_join(thread[i], NULL));
    push_out(own, LEN);
    check(own, LEN, 2);
}

int main(int argc, char **argv) {
    static const struct test all[] = {{"marked", marked}, {"parts", parts}, {"moved", moved}, {"racing", racing}};
    return RUN_NAMED(argc, argv, all);
}
