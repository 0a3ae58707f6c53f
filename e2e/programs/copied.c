/* Forks of a program with incompressible data, so that most of it is in the swap file. Each
 * process finds every byte of its own, whatever the others write, discard and copy. */
#include "common.h"
#include "filtered.h"
#include <sched.h>
#include <sys/prctl.h>

static const size_t LEN = 40 * UNIT;
static char *data;

/* Fills a page with incompressible bytes. */
static void write_page(size_t page, uint64_t seed) {
    uint64_t *to = (uint64_t *)(data + page * PAGE), key = page_key(seed, page);
    for (unsigned w = 0; w < PAGE / 8; w++) to[w] = mix(key + w);
}

static void check_page(size_t page, uint64_t seed) {
    uint64_t *at = (uint64_t *)(data + page * PAGE), key = page_key(seed, page);
    for (unsigned w = 0; w < PAGE / 8; w++) NEED(at[w] == mix(key + w));
}

static void write_all(uint64_t seed) {
    for (size_t page = 0; page < LEN / PAGE; page++) write_page(page, seed);
}

static void check_all(uint64_t seed) {
    for (size_t page = 0; page < LEN / PAGE; page++) check_page(page, seed);
}

static void begin(void) {
    data = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(data != MAP_FAILED);
    write_all(1);
    check_all(1);
}

static void end_child(void) { _exit(3); }
static void expect_end(pid_t pid) { NEED(wait_for(pid) == 3 << 8); }

/* A child changes its user namespace, for which memfold's threads end and start again. It goes on to
 * use its parent's file and its own, and so does its own child. */
static void unshared(void) {
    begin();
    pid_t child = fork();
    if (child == 0) {
        NEED(unshare(CLONE_NEWUSER) == 0);
        check_all(1);
        write_all(4);
        check_all(4);
        pid_t inner = fork();
        if (inner == 0) {
            check_all(4);
            write_all(5);
            check_all(5);
            end_child();
        }
        check_all(4);
        expect_end(inner);
        end_child();
    }
    write_all(2);
    expect_end(child);
    check_all(2);
}

/* The parent rewrites everything twice, while a child reads the old data, and a grandchild
 * writes too. */
static void both(void) {
    begin();
    pid_t child = fork();
    if (child == 0) {
        check_all(1);
        pid_t inner = fork();
        if (inner == 0) {
            check_all(1);
            write_all(9);
            check_all(9);
            end_child();
        }
        write_all(4);
        check_all(4);
        expect_end(inner);
        check_all(4);
        end_child();
    }
    write_all(2);
    check_all(2);
    write_all(3);
    check_all(3);
    expect_end(child);
    check_all(3);
}

/* Forks while many blocks are partly resident: one page, not the first, has been read. */
static void parts(void) {
    enum { READS = 2000, BLOCK = 4 };
    begin();
    for (uint64_t i = 0; i < READS; i++) check_page(mix(i) % (LEN / PAGE / BLOCK) * BLOCK + 1 + i % (BLOCK - 1), 1);
    pid_t child = fork();
    check_all(1);
    if (child == 0) end_child();
    expect_end(child);
}

/* Each generation changes a part, and reads the data of all its ancestors. There are more
 * generations than the limit of stacked files. */
static void generations(void) {
    enum { DEPTH = 7 };
    static uint64_t seed[40 * UNIT / PAGE];
    begin();
    for (size_t page = 0; page < LEN / PAGE; page++) seed[page] = 1;
    for (int depth = 0; depth < DEPTH; depth++) {
        pid_t child = fork();
        if (child > 0) {
            for (size_t page = depth; page < LEN / PAGE; page += 5) write_page(page, seed[page] = 100 + depth);
            for (size_t page = 0; page < LEN / PAGE; page++) check_page(page, seed[page]);
            expect_end(child);
            for (size_t page = 0; page < LEN / PAGE; page++) check_page(page, seed[page]);
            if (depth > 0) end_child();
            return;
        }
        NEED(child == 0);
        for (size_t page = 0; page < LEN / PAGE; page++) check_page(page, seed[page]);
        for (size_t page = depth; page < LEN / PAGE; page += 3) write_page(page, seed[page] = 200 + depth);
    }
    for (size_t page = 0; page < LEN / PAGE; page++) check_page(page, seed[page]);
    end_child();
}

/* More children at once than there are separate sets of slots. The parent changes its data
 * before each fork. */
static void many(void) {
    enum { CHILDREN = 18 };
    pid_t child[CHILDREN];
    int go[2];
    begin();
    NEED(pipe(go) == 0);
    for (int i = 0; i < CHILDREN; i++) {
        for (size_t page = i; page < LEN / PAGE; page += CHILDREN) write_page(page, 2 + i);
        if ((child[i] = fork()) == 0) {
            char byte;
            close(go[1]);
            NEED(read(go[0], &byte, 1) == 0);
            for (size_t page = i % 4; page < LEN / PAGE; page += 4)
                check_page(page, page % CHILDREN <= (size_t)i ? 2 + page % CHILDREN : 1);
            end_child();
        }
    }
    write_all(77);
    close(go[1]);
    for (int i = 0; i < CHILDREN; i++) expect_end(child[i]);
    check_all(77);
}

/* Forks one child after another, and rewrites everything each time. The slots that ended
 * children read are reused. */
static void again(void) {
    begin();
    for (uint64_t round = 2; round < 14; round++) {
        pid_t child = fork();
        if (child == 0) {
            for (size_t page = 0; page < LEN / PAGE; page += 16) check_page(page, round - 1);
            end_child();
        }
        write_all(round);
        expect_end(child);
        check_all(round);
    }
}

/* Children that touch nothing. */
static void idle(void) {
    begin();
    for (int i = 0; i < 12; i++) {
        pid_t child = fork();
        if (child == 0) end_child();
        expect_end(child);
    }
}

static volatile int stop;

static void *turn_over(void *arg) {
    size_t which = (size_t)arg;
    for (uint64_t seed = 10; !stop; seed++) {
        for (size_t page = which; page < LEN / PAGE && !stop; page += 4) write_page(page, seed);
        if (stop) break;
        for (size_t page = which; page < LEN / PAGE && !stop; page += 4) check_page(page, seed);
    }
    return NULL;
}

/* Threads write and read the file while another thread forks. */
static void busy(void) {
    enum { BUSY_ROUNDS = 5 };
    pthread_t thread[3];
    begin();
    for (size_t i = 0; i < 3; i++) NEED(pthread_create(&thread[i], NULL, turn_over, (void *)i) == 0);
    for (int round = 0; round < BUSY_ROUNDS; round++) {
        pid_t child = fork();
        if (child == 0) {
            for (size_t page = 3; page < LEN / PAGE; page += 4) check_page(page, 1 + round);
            write_all(50);
            check_all(50);
            end_child();
        }
        for (size_t page = 3; page < LEN / PAGE; page += 4) write_page(page, 2 + round);
        expect_end(child);
    }
    stop = 1;
    for (int i = 0; i < 3; i++) pthread_join(thread[i], NULL);
    for (size_t page = 3; page < LEN / PAGE; page += 4) check_page(page, 1 + BUSY_ROUNDS);
}

/* A process closes all its descriptors, forks, and finds every byte. */
static void closed(void) {
    begin();
    for (int fd = 3; fd < 1100; fd++) close(fd);
    close_range(3, ~0u, 0);
    check_all(1);
    pid_t child = fork();
    if (child == 0) {
        close_range(3, ~0u, 0);
        write_all(2);
        pid_t inner = fork();
        if (inner == 0) {
            check_all(2);
            end_child();
        }
        expect_end(inner);
        check_all(2);
        end_child();
    }
    expect_end(child);
    check_all(1);
}

/* A child that may write to no directory reads the old data. */
static void barred(void) {
    begin();
    NEED(chdir("/proc") == 0);
    pid_t child = fork();
    if (child == 0) {
        check_all(1);
        NEED(chroot("/proc/self/fd") == 0 && chdir("/") == 0);
        pid_t inner = fork();
        if (inner == 0) {
            check_all(1);
            write_all(5);
            check_all(5);
            end_child();
        }
        expect_end(inner);
        check_all(1);
        end_child();
    }
    expect_end(child);
    check_all(1);
}

/* A child whose parent has ended reads the parent's data, and continues. */
static void orphan(void) {
    int told[2];
    char byte = 0;
    begin();
    NEED(pipe(told) == 0);
    pid_t parent = fork();
    if (parent == 0) {
        write_all(2);
        pid_t middle = getpid();
        if (fork() == 0) {
            while (getppid() == middle) usleep(1000);
            check_all(2);
            write_all(3);
            check_all(3);
            NEED(write(told[1], "x", 1) == 1);
            end_child();
        }
        write_all(4);
        end_child();
    }
    close(told[1]);
    expect_end(parent);
    write_all(5);
    NEED(read(told[0], &byte, 1) == 1 && byte == 'x');
    check_all(5);
}

/* When a child executes another program, the slots that it could have read are free at once,
 * long before the program ends. */
static void execs(void) {
    enum { CHILDREN = 12 };
    pid_t child[CHILDREN];
    begin();
    for (uint64_t i = 0; i < CHILDREN; i++) {
        int told[2];
        char byte;
        NEED(pipe2(told, O_CLOEXEC) == 0);
        if ((child[i] = fork()) == 0) {
            execl("/bin/sleep", "sleep", "600", NULL);
            _exit(9);
        }
        close(told[1]);
        NEED(read(told[0], &byte, 1) == 0);
        write_all(2 + i);
        check_all(2 + i);
    }
    for (int i = 0; i < CHILDREN; i++) {
        kill(child[i], SIGKILL);
        wait_for(child[i]);
    }
}

/* A child without a userfaultfd loads all its memory, including data in its grandparent's file. */
static void filter(void) {
    begin();
    pid_t child = fork();
    if (child == 0) {
        for (size_t page = 0; page < LEN / PAGE; page += 2) write_page(page, 2);
        for (size_t page = 0; page < LEN / PAGE; page++) check_page(page, page % 2 ? 1 : 2);
        NEED(forbid(SYS_userfaultfd) == 0);
        pid_t inner = fork();
        if (inner == 0) {
            for (size_t page = 0; page < LEN / PAGE; page++) check_page(page, page % 2 ? 1 : 2);
            write_all(3);
            pid_t last = fork();
            if (last == 0) {
                check_all(3);
                end_child();
            }
            expect_end(last);
            check_all(3);
            end_child();
        }
        for (size_t page = 0; page < LEN / PAGE; page++) write_page(page, 7);
        expect_end(inner);
        check_all(7);
        end_child();
    }
    write_all(8);
    expect_end(child);
    check_all(8);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"both", both}, {"unshared", unshared}, {"parts", parts}, {"generations", generations}, {"many", many}, {"again", again}, {"busy", busy}, {"closed", closed},
        {"barred", barred}, {"orphan", orphan}, {"execs", execs}, {"filter", filter}, {"idle", idle},
    };
    return RUN_NAMED(argc, argv, all);
}
