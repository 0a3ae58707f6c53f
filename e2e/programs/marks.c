/* Memory that is folded and then marked as never to be folded: locked, or excluded from fork or
 * core dumps. */
#include "bare.h"

static const size_t LEN = 40 * UNIT;
static char *p;
/* The marked part. It begins and ends in the middle of folios and blocks. */
static char *marked;
static const size_t MARKED = 9 * UNIT + 5 * PAGE;
static size_t before;

static void prepare(uint64_t seed) {
    p = map(LEN);
    fill(p, LEN, seed);
    push_out(p, LEN);
    marked = p + 13 * UNIT + 3 * PAGE;
    before = (marked - p) / PAGE;
}

static void check_all(uint64_t seed) { check(p, LEN, seed); }

/* The marked part is resident and stays so, however much is folded. The rest of the program is
 * folded as before. */
static void check_stays(uint64_t seed) {
    NEED(present(marked, MARKED) == MARKED / PAGE);
    for (int round = 0; round < 4; round++) {
        push_out(p, LEN - MARKED);
        fill(filler, 48 * UNIT, round);
        NEED(present(marked, MARKED) == MARKED / PAGE);
        check_from(marked, MARKED, seed + (round > 0 ? 50 : 0), before);
        fill_from(marked, MARKED, seed + 50, before);
    }
    NEED(present(p, LEN) < (LEN + MARKED) / PAGE / 2);
    check(p, marked - p, seed);
    check_from(marked, MARKED, seed + 50, before);
    check_from(marked + MARKED, LEN - MARKED - before * PAGE, seed, before + MARKED / PAGE);
    fill_from(marked, MARKED, seed, before);
    check_all(seed);
}

/* Whether the VmFlags of the area with this address in /proc/self/smaps contain `flag`. */
static int has_flag(const void *address, const char *flag) {
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

static void locks(void) {
    prepare(1);
    NEED(mlock(marked + 5, MARKED - 10) == 0);
    check_stays(1);
    NEED(munlock(marked, MARKED) == 0);
    push_out(p, LEN);
    push_out(marked, MARKED);
    check_all(1);
    NEED(mlock2(marked, MARKED, MLOCK_ONFAULT) == 0);
    check_stays(1);
    NEED(munlock(marked, MARKED) == 0);
    NEED(syscall(SYS_mlock, marked, MARKED) == 0);
    check_stays(1);
    NEED(syscall(SYS_mlock2, marked, MARKED, 0) == 0);
    /* A call that fails changes nothing. */
    NEED(mlock((void *)8, 5) == -1 && errno == ENOMEM);
    NEED(mlock2(marked, MARKED, 1 << 20) == -1 && errno == EINVAL);
    check_all(1);
}

static void lock_all(void) {
    prepare(2);
    NEED(mlockall(MCL_CURRENT) == 0);
    NEED(present(p, LEN) == LEN / PAGE);
    fill(filler, 48 * UNIT, 5);
    NEED(present(p, LEN) == LEN / PAGE);
    check_all(2);
    /* Memory mapped later is not marked. */
    char *q = map(LEN);
    fill(q, LEN, 3);
    NEED(munlockall() == 0);
    for (int round = 0; round < 20 && present(q, LEN) == LEN / PAGE; round++) check(filler, 48 * UNIT, 5), check_all(2);
    check(q, LEN, 3);
    NEED(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
    char *r = map(8 * UNIT);
    NEED(present(r, 8 * UNIT) == 8 * UNIT / PAGE && present(q, LEN) == LEN / PAGE);
    fill(r, 8 * UNIT, 4);
    usleep(50000);
    NEED(present(r, 8 * UNIT) == 8 * UNIT / PAGE);
    check(q, LEN, 3);
    check(r, 8 * UNIT, 4);
}

static void dump(void) {
    prepare(5);
    NEED(madvise(marked, MARKED, MADV_DONTDUMP) == 0);
    NEED(has_flag(marked, " dd"));
    check_stays(5);
    /* New memory with the mark is not adopted. */
    char *q = map(16 * UNIT);
    NEED(syscall(SYS_madvise, q, 16 * UNIT, MADV_DONTDUMP) == 0);
    fill(q, 16 * UNIT, 6);
    push_out(p, LEN - MARKED);
    fill(filler, 48 * UNIT, 5);
    NEED(present(q, 16 * UNIT) == 16 * UNIT / PAGE);
    /* When the mark is cleared, the memory is managed like any other. */
    NEED(madvise(marked, MARKED, MADV_DODUMP) == 0 && madvise(q, 16 * UNIT, MADV_DODUMP) == 0);
    char *more = map(16 * UNIT);
    fill(more, 16 * UNIT, 7);
    push_out(q, 16 * UNIT);
    push_out(marked, MARKED);
    check(q, 16 * UNIT, 6);
    check(more, 16 * UNIT, 7);
    check_all(5);
    NEED(madvise(marked + 1, PAGE, MADV_DONTDUMP) == -1 && errno == EINVAL);
}

static volatile int is_done;
static void *keep_busy(void *memory) {
    while (!is_done)
        if (memory) fill(memory, 8 * UNIT, 5), check(memory, 8 * UNIT, 5);
    return NULL;
}

/* Memory that could not be adopted at once, because other threads kept the CPUs busy, is adopted
 * later. */
static void unmarked(void) {
    pthread_t busy[8];
    prepare(5);
    for (int i = 0; i < 8; i++) NEED(!pthread_create(&busy[i], NULL, keep_busy, i < 2 ? p : NULL));
    for (int round = 0; round < 6; round++) {
        NEED(!madvise(marked, MARKED, MADV_DONTDUMP));
        check_from(marked, MARKED, 5, before);
        NEED(!madvise(marked, MARKED, MADV_DODUMP));
        push_out(marked, MARKED);
    }
    is_done = 1;
    for (int i = 0; i < 8; i++) NEED(!pthread_join(busy[i], NULL));
    check_all(5);
}

/* Marks more memory than the limit. */
static void dump_large(void) {
    char *q = map(48 * UNIT);
    NEED(madvise(q, 48 * UNIT, MADV_DONTDUMP) == 0);
    fill(q, 48 * UNIT, 6);
    usleep(100000);
    check(q, 48 * UNIT, 6);
}

/* With --dont-dump fold, memory excluded from core dumps is folded like any other, whether
 * marked before or after it was adopted. */
static void dump_folded(void) {
    prepare(5);
    NEED(madvise(marked, MARKED, MADV_DONTDUMP) == 0);
    char *q = map(16 * UNIT);
    NEED(madvise(q, 16 * UNIT, MADV_DONTDUMP) == 0);
    fill(q, 16 * UNIT, 6);
    push_out(marked, MARKED);
    push_out(q, 16 * UNIT);
    NEED(has_flag(marked, " dd") && has_flag(q, " dd"));
    check(q, 16 * UNIT, 6);
    check_all(5);
    /* Locks keep their meaning. */
    NEED(mlock(marked, MARKED) == 0);
    check_stays(5);
}

static void ended(pid_t pid, int want) {
    int status;
    NEED(pid > 0);
    NEED(waitpid(pid, &status, 0) == pid);
    NEED(want ? WIFSIGNALED(status) && WTERMSIG(status) == want : status == 0);
}

static void forks(void) {
    prepare(8);
    NEED(madvise(marked, MARKED, MADV_DONTFORK) == 0);
    NEED(has_flag(marked, " dc"));
    pid_t pid = fork();
    if (pid == 0) {
        check(p, marked - p, 8);
        check_from(marked + MARKED, LEN - MARKED - before * PAGE, 8, before + MARKED / PAGE);
        fill(p, marked - p, 9);
        push_out(p, LEN - MARKED);
        check(p, marked - p, 9);
        _exit(0);
    }
    ended(pid, 0);
    if ((pid = fork()) == 0) _exit(*(volatile char *)(marked + UNIT) & 1);
    ended(pid, SIGSEGV);
    check_all(8);
    /* When the mark is cleared, the memory is folded and copied like any other. */
    NEED(madvise(marked, MARKED, MADV_DOFORK) == 0);
    char *more = map(16 * UNIT);
    fill(more, 16 * UNIT, 7);
    push_out(marked, MARKED);
    if ((pid = fork()) == 0) {
        check_all(8);
        fill(p, LEN, 10);
        push_out(p, LEN);
        check_all(10);
        _exit(0);
    }
    ended(pid, 0);
    check_all(8);
    /* Clears the mark of memory that has none, as some libraries do. Managed memory is
     * unchanged. */
    NEED(madvise(p, LEN, MADV_DOFORK) == 0);
    push_out(p, LEN);
    check_all(8);
}

static void wipe(void) {
    prepare(11);
    NEED(madvise(marked, MARKED, MADV_WIPEONFORK) == 0);
    NEED(has_flag(marked, " wf"));
    check_stays(11);
    pid_t pid = fork();
    if (pid == 0) {
        check_zero(marked, MARKED);
        check(p, marked - p, 11);
        check_from(marked + MARKED, LEN - MARKED - before * PAGE, 11, before + MARKED / PAGE);
        fill_from(marked, MARKED, 12, before);
        fill(filler, 48 * UNIT, 5);
        check_from(marked, MARKED, 12, before);
        pid_t next = fork();
        if (next == 0) {
            check_zero(marked, MARKED);
            _exit(0);
        }
        ended(next, 0);
        check_from(marked, MARKED, 12, before);
        _exit(0);
    }
    ended(pid, 0);
    check_all(11);
    NEED(madvise(marked, MARKED, MADV_KEEPONFORK) == 0);
    if ((pid = fork()) == 0) {
        check_all(11);
        _exit(0);
    }
    ended(pid, 0);
    check_all(11);
}

static volatile int stop;
static void *work(void *arg) {
    for (uint64_t at = (uintptr_t)arg; !stop; at = mix(at)) {
        size_t page = at % (LEN / PAGE);
        check_from(p + page * PAGE, PAGE, 13, page);
    }
    return NULL;
}

/* Marks are set and cleared while other threads use the memory. */
static void threads(void) {
    prepare(13);
    pthread_t thread[3];
    for (uintptr_t i = 0; i < 3; i++) NEED(!pthread_create(&thread[i], NULL, work, (void *)(i + 1)));
    for (int round = 0; round < 30; round++) {
        size_t at = mix(round) % (LEN / PAGE - 900) * PAGE, len = (1 + mix(round + 100) % 800) * PAGE;
        NEED(round % 2 ? madvise(p + at, len, MADV_DONTDUMP) == 0 : mlock(p + at, len) == 0);
        NEED(present(p + at, len) == len / PAGE);
        fill(filler, 8 * UNIT, round);
        NEED(present(p + at, len) == len / PAGE);
        NEED(round % 2 ? madvise(p + at, len, MADV_DODUMP) == 0 : munlock(p + at, len) == 0);
    }
    stop = 1;
    for (int i = 0; i < 3; i++) NEED(!pthread_join(thread[i], NULL));
    check_all(13);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"locks", locks}, {"lock_all", lock_all}, {"dump", dump}, {"dump_folded", dump_folded},
        {"unmarked", unmarked}, {"dump_large", dump_large}, {"forks", forks}, {"wipe", wipe}, {"threads", threads},
    };
    return RUN_NAMED(argc, argv, all);
}
