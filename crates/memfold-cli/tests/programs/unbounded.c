/* Programs without a limit: what they don't use is folded. */
#include "common.h"

static const size_t LEN = 96 * UNIT;

/* Does `work` until at most `most` pages are present. */
static void await(void *at, size_t len, size_t most, void (*work)(void), int rounds) {
    for (int round = 0; round < rounds; round++) {
        if (present(at, len) <= most) return;
        work();
    }
    fail("memory was not folded", __FILE__, __LINE__);
}

static char *memory;

/* A working program keeps the tenth that it uses, and nothing of the rest is lost. */
static void use_a_tenth(void) {
    for (int i = 0; i < 3; i++) check(memory, LEN / 10 / PAGE * PAGE, 1);
}
static void used(void) {
    memory = map(LEN);
    fill(memory, LEN, 1);
    await(memory, LEN, LEN / PAGE / 2, use_a_tenth, 200000);
    check(memory, LEN, 1);
    fill(memory, LEN, 2);
    check(memory, LEN, 2);
}

/* An idle program keeps next to nothing, and has all of it when it works again. */
static void sleep_a_while(void) { sleep(2); }
static void idle(void) {
    memory = map(LEN);
    fill(memory, LEN, 3);
    for (int round = 0; round < 2; round++) {
        await(memory, LEN, LEN / PAGE / 5, sleep_a_while, 100);
        check(memory, LEN, 3 + round);
        fill(memory, LEN, 4 + round);
    }
    check(memory, LEN, 5);
}

/* Memory that comes and goes meanwhile, in children too. */
static void changes(void) {
    memory = map(LEN);
    fill(memory, LEN, 6);
    await(memory, LEN, LEN / PAGE / 5, sleep_a_while, 100);
    char *more = map(8 * UNIT);
    fill(more, 8 * UNIT, 7);
    NEED(mremap(memory, 16 * UNIT, 8 * UNIT, 0) == memory);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        check_from(memory + 16 * UNIT, LEN - 16 * UNIT, 6, 16 * UNIT / PAGE);
        _exit(7);
    }
    NEED(WEXITSTATUS(wait_for(pid)) == 7);
    check(memory, 8 * UNIT, 6);
    check(more, 8 * UNIT, 7);
    NEED(munmap(more, 8 * UNIT) == 0);
}

int main(int argc, char **argv) {
    static const struct test all[] = {{"used", used}, {"idle", idle}, {"changes", changes}};
    return RUN_NAMED(argc, argv, all);
}
