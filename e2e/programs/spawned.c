/* Spawns itself often, with random actions and masks of signals, and prints what each child has
   and what the parent keeps. */
#include "common.h"
#include <signal.h>
#include <spawn.h>

static volatile int handled;
static void count(int signal) { handled += signal; }

static void show(const char *who) {
    sigset_t mask;
    NEED(!sigprocmask(SIG_BLOCK, NULL, &mask));
    printf("%s", who);
    for (int signal = 1; signal < 64; signal++) {
        struct sigaction action;
        if (sigaction(signal, NULL, &action)) continue;
        int how = action.sa_handler == SIG_DFL ? 0 : action.sa_handler == SIG_IGN ? 1 : 2;
        printf(" %d%s", how, sigismember(&mask, signal) ? "b" : "");
    }
    puts("");
    fflush(stdout);
}

/* Signals whose actions the test may change. */
static int any_signal(void) {
    static const int known[] = {SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE, SIGALRM, SIGTERM,
                                SIGSEGV, SIGBUS, SIGSYS, SIGWINCH, 40, 50};
    return known[rand() % (sizeof known / sizeof *known)];
}

int main(int argc, char **argv) {
    if (argc > 1) return show("child "), 0;
    /* A test in the background inherits that some are ignored. */
    for (int signal = 1; signal < 64; signal++) (void)sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    size_t bytes = 48 << 20;
    unsigned *kept = map(bytes);
    for (size_t n = 0; n < bytes / sizeof *kept; n++) kept[n] = n * 2654435761u;
    srand(7);
    for (int round = 0; round < 24; round++) {
        for (int n = rand() % 6; n > 0; n--) {
            void (*how[])(int) = {SIG_DFL, SIG_IGN, count};
            struct sigaction action = {.sa_handler = how[rand() % 3], .sa_flags = SA_RESTART};
            NEED(!sigaction(any_signal(), &action, NULL));
        }
        sigset_t mask, defaults, old;
        sigemptyset(&mask), sigemptyset(&defaults);
        for (int n = rand() % 4; n > 0; n--) sigaddset(&mask, any_signal());
        for (int n = rand() % 4; n > 0; n--) sigaddset(&defaults, any_signal());
        NEED(!sigprocmask(SIG_SETMASK, &mask, &old));
        posix_spawnattr_t about;
        NEED(!posix_spawnattr_init(&about));
        short flags = (rand() % 2 ? POSIX_SPAWN_SETSIGDEF : 0) | (rand() % 2 ? POSIX_SPAWN_SETSIGMASK : 0);
        NEED(!posix_spawnattr_setflags(&about, flags));
        NEED(!posix_spawnattr_setsigdefault(&about, &defaults));
        NEED(!posix_spawnattr_setsigmask(&about, &defaults));
        pid_t child;
        char *words[] = {argv[0], "child", NULL};
        NEED(!posix_spawn(&child, argv[0], NULL, &about, words, environ));
        NEED(wait_for(child) == 0);
        show("parent");
        struct sigaction action = {.sa_handler = count};
        NEED(!sigaction(SIGUSR1, &action, NULL));
        NEED(!sigprocmask(SIG_SETMASK, &old, NULL));
        NEED(!kill(getpid(), SIGUSR1));
        printf("%d\n", handled);
    }
    for (size_t n = 0; n < bytes / sizeof *kept; n++) NEED(kept[n] == (unsigned)(n * 2654435761u));
    puts("right");
}
