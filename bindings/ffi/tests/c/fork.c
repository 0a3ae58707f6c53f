/* A child of fork has nothing of its parent's, is told so, and may have a memory of its own. */
#include "test.h"
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static memfold_t memory;
static void *at;

static void refused_in_child(void) {
    void *other;
    memfold_stats_t stats;
    REFUSED(memfold_map(memory, 1, &other), FORKED, "forked child");
    REFUSED(memfold_unmap(memory, at), FORKED, "forked child");
    REFUSED(memfold_resize(memory, at, 5, &other), FORKED, "forked child");
    REFUSED(memfold_fold(memory, at, 5), FORKED, "forked child");
    REFUSED(memfold_pin(memory, at, 5), FORKED, "forked child");
    REFUSED(memfold_stats(memory, &stats, sizeof stats), FORKED, "forked child");
    REFUSED(memfold_destroy(memory), FORKED, "forked child");
    memfold_t own;
    OK(memfold_create("limit=32M", &own));
    OK(memfold_map(own, 1000, &other));
    memset(other, 1, 1000);
    OK(memfold_fold(own, other, 1000));
    OK(memfold_destroy(own));
}

static int status_of(void (*work)(void)) {
    int status;
    pid_t child = fork();
    if (child == 0) {
        work();
        exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

static void touch(void) { CHECK(*(volatile char *)at == 5); }

int main(void) {
    OK(memfold_create("limit=32M", &memory));
    OK(memfold_map(memory, 100 << 20, &at));
    for (size_t i = 0; i < 100 << 20; i++) ((char *)at)[i] = (char)(i >> 12) + 5;
    CHECK(status_of(refused_in_child) == 0);
    int status = status_of(touch);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    for (size_t i = 0; i < 100 << 20; i++) CHECK(((char *)at)[i] == (char)((char)(i >> 12) + 5));
    OK(memfold_destroy(memory));
    return 0;
}
