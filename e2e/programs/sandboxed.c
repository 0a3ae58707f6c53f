/* A program sets a filter that refuses calls which memfold needs, but none of its own. It goes on as
 * without memfold: threads, processes, signals, and every byte of its memory. */
#include "common.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>

#define LEN (24 * UNIT)
#define SET_DISPATCH 59
static char *memory;

/* Refuses one call if an argument has a value, or by its number alone if `place` is negative. */
struct rule {
    const char *what;
    unsigned nr;
    int place;
    unsigned value;
};
static const struct rule rules[] = {
    {"prctl", SYS_prctl, 0, SET_DISPATCH},
    {"madvise", SYS_madvise, 2, MADV_POPULATE_WRITE},
    {"ioctl", SYS_ioctl, 1, (unsigned)UFFDIO_COPY},
    {"pwrite64", SYS_pwrite64, -1, 0},
    {"futex", SYS_futex, 1, 128},
    {"process_madvise", SYS_process_madvise, -1, 0},
    {"userfaultfd", SYS_userfaultfd, -1, 0},
    {"sigaltstack", SYS_sigaltstack, -1, 0},
    {"tgkill", SYS_tgkill, -1, 0},
};
static const unsigned actions[] = {SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_TRAP, SECCOMP_RET_ERRNO | EPERM, SECCOMP_RET_ERRNO | ENOSYS,
                                   SECCOMP_RET_KILL_THREAD};
#define COUNT(x) (sizeof x / sizeof *x)
/* The first rule meets all actions. If `which_rules` is OTHERS_TOO, each other one meets the next of three, and if it is EVERY, all three. */
static enum { FIRST, OTHERS_TOO, EVERY } which_rules = OTHERS_TOO;
static int meets(size_t r, size_t a) { return r == 0 || (which_rules != FIRST && a < 3 && (which_rules == EVERY || a == r % 3)); }

static void set(const struct rule *rule, unsigned action, unsigned flags) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, rule->nr, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, rule->place < 0 ? 0 : 16 + 8 * rule->place),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, rule->place < 0 ? rule->nr : rule->value, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, action),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {COUNT(code), code};
    NEED(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
    NEED(!(flags ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &filter) : prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)));
}

static volatile int signals, traps;
static void on_signal(int signal) { signals += signal == SIGUSR1, traps += signal == SIGSYS; }

static int waits[2], starts[2];
static volatile pid_t waiting;
static pthread_t other;
static void *checks(void *arg) {
    check(memory, LEN, 1);
    return arg;
}
static void in_a_thread(void) {
    pthread_t thread;
    void *result;
    NEED(!pthread_create(&thread, NULL, checks, memory) && !pthread_join(thread, &result) && result == memory);
}
/* Waits in calls while the filter is set, and starts a thread afterwards. */
static void *beside(void *arg) {
    char byte;
    waiting = gettid();
    NEED(read(waits[0], &byte, 1) == 1);
    in_a_thread();
    NEED(write(starts[1], "", 1) == 1);
    return arg;
}

static const struct rule *rule;
static unsigned action;
static enum { ALONE, ONE_OF_MANY, ALL } when;

static void goes_on(void) {
    struct sigaction handler = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    NEED(!sigaction(SIGUSR1, &handler, NULL) && !sigaction(SIGSYS, &handler, NULL));
    NEED(!pipe(waits) && !pipe(starts));
    if (when != ALONE) {
        NEED(!pthread_create(&other, NULL, beside, NULL));
        while (!waiting) usleep(100);
    }
    set(rule, action, when == ALL ? SECCOMP_FILTER_FLAG_TSYNC : 0);
    check(memory, LEN, 1);
    if (rule->nr != SYS_tgkill) {
        /* One signal for this thread, and one for the thread that waits. */
        NEED(!raise(SIGUSR1) && signals == 1);
        if (when != ALONE) {
            NEED(!pthread_kill(other, SIGUSR1));
            while (signals < 2) usleep(100);
        }
    }
    if (when != ALONE) {
        char byte;
        NEED(write(waits[1], "", 1) == 1 && read(starts[0], &byte, 1) == 1 && !pthread_join(other, NULL));
    }
    in_a_thread();
    fill(memory, LEN, 2);
    check(memory, LEN, 2);
    fill(memory, LEN, 1);
    pid_t child = fork();
    NEED(child >= 0);
    if (!child) {
        in_a_thread();
        _exit(6);
    }
    NEED(wait_for(child) == 6 << 8);
    NEED(!traps);
    if (action == SECCOMP_RET_TRAP && rule->nr == SYS_prctl) {
        prctl(SET_DISPATCH, 0, 0, 0, 0);
        NEED(traps == 1);
    }
    _exit(7);
}

static void each(int which) {
    when = which;
    memory = map_folded(LEN, 1);
    for (size_t r = 0; r < COUNT(rules); r++)
        for (size_t a = 0; a < COUNT(actions); a++) {
            if (!meets(r, a)) continue;
            rule = &rules[r], action = actions[a];
            fflush(NULL);
            pid_t child = fork();
            NEED(child >= 0);
            if (!child) {
                alarm(60);
                goes_on();
            }
            int status = wait_for(child);
            if (status != 7 << 8) {
                fprintf(stderr, "status %x: %s refused by %x\n", status, rule->what, action);
                _exit(97);
            }
        }
    check(memory, LEN, 1);
}
static void alone(void) { which_rules = FIRST, each(ALONE); }
static void one_of_many(void) { each(ONE_OF_MANY); }
static void first_rule(void) { which_rules = FIRST, each(ONE_OF_MANY); }
static void all(void) { which_rules = FIRST, each(ALL); }

/* The filter is set by one program, and another one runs under it. */
static void executed(void) {
    memory = map_folded(LEN, 1);
    for (size_t r = 0; r < COUNT(rules); r++)
        for (size_t a = 0; a < COUNT(actions); a++) {
            if (!meets(r, a)) continue;
            fflush(NULL);
            pid_t child = fork();
            NEED(child >= 0);
            if (!child) {
                set(&rules[r], actions[a], 0);
                execl("/proc/self/exe", "sandboxed", "grows", NULL);
                _exit(96);
            }
            int status = wait_for(child);
            if (status) {
                fprintf(stderr, "status %x: %s refused by %x\n", status, rules[r].what, actions[a]);
                _exit(97);
            }
        }
    check(memory, LEN, 1);
}
static void grows(void) {
    alarm(60);
    memory = map(LEN);
    fill(memory, LEN, 1);
    check(memory, LEN, 1);
    in_a_thread();
    int null = open("/dev/null", O_WRONLY);
    NEED(dup2(null, 1) == 1);
}

static void every_rule(void) {
    which_rules = EVERY;
    for (int which = ALONE; which <= ALL; which++) each(which);
    executed();
}

int main(int argc, char **argv) {
    static const struct test tests[] = {{"alone", alone},       {"one_of_many", one_of_many}, {"first_rule", first_rule}, {"all", all},
                                        {"executed", executed}, {"grows", grows},             {"every_rule", every_rule}};
    return RUN_NAMED(argc, argv, tests);
}
