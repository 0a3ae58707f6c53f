/* Lists of actions, and the threads and processes that run them. */
#include "calls.h"
#include "filtered.h"
#include <sched.h>

enum { CHILDREN = 16, DEPTH = 3, AREA = 8 };

/* A program is lists of actions. `main` runs list 0. */
struct list {
    void (*run)(void);
    int rounds;
};

static const struct list *lists;
static pid_t children[OWNERS][CHILDREN];
static unsigned child_count[OWNERS];
/* The thread that may start others. */
static unsigned leader;
static pthread_t threads[OWNERS];
static int is_started[OWNERS];
static pthread_t sender[OWNERS];
static int is_sending[OWNERS];

static void run_list(unsigned n) {
    for (int round = 0; round < lists[n].rounds; round++) lists[n].run();
}

/* Memory of a signal handler that comes at any time: it holds one generation. */
static uint64_t area[OWNERS][AREA][PAGE / 8] __attribute__((aligned(4096)));
static uint64_t generation[OWNERS];

static void on_tick(int signal) {
    uint64_t was = generation[me], now = was + 1;
    for (size_t p = 0; p < AREA; p++)
        for (unsigned w = 0; w < PAGE / 8; w += 8) {
            NEED(area[me][p][w] == (was ? mix(was + p * PAGE + w) : 0));
            area[me][p][w] = mix(now + p * PAGE + w);
        }
    generation[me] = now;
    (void)signal;
}

struct sending {
    pthread_t to;
    int count;
};

static void *send_ticks(void *arg) {
    struct sending sending = *(struct sending *)arg;
    free(arg);
    for (int i = 0; i < sending.count; i++) {
        NEED(pthread_kill(sending.to, SIGUSR2) == 0);
        usleep(300);
    }
    return NULL;
}

static void end_ticks(void) {
    if (is_sending[me]) NEED(pthread_join(sender[me], NULL) == 0);
    is_sending[me] = 0;
}

/* Sends this thread signals while it continues. */
static void begin_ticks(int count) {
    struct sending *sending = malloc(sizeof *sending);
    end_ticks();
    NEED(sending);
    *sending = (struct sending){pthread_self(), count};
    NEED(pthread_create(&sender[me], NULL, send_ticks, sending) == 0);
    is_sending[me] = 1;
}

static __thread struct { unsigned slot; size_t first, count; } handled;

static void on_signal(int signal) {
    check_pages(handled.slot, handled.first, handled.count, SCATTERED);
    write_pages(handled.slot, handled.first, handled.count / 2, SCATTERED, NOISE);
    (void)signal;
}

/* A signal whose handler uses pages, on the thread's stack or on one of its own. */
static void signal_pages(unsigned slot, size_t first, size_t count, int is_alternate) {
    const size_t len = 64 * PAGE;
    char *stack = NULL;
    if (is_alternate) {
        stack = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        NEED(stack != MAP_FAILED);
        fill(stack, len, new_seed());
        stack_t own = {.ss_sp = stack, .ss_size = len};
        NEED(sigaltstack(&own, NULL) == 0);
    }
    handled.slot = slot, handled.first = first, handled.count = count;
    NEED(pthread_kill(pthread_self(), SIGUSR1) == 0);
    if (is_alternate) {
        stack_t none = {.ss_flags = SS_DISABLE};
        NEED(sigaltstack(&none, NULL) == 0 && munmap(stack, len) == 0);
    }
}

static void wait_children(void) {
    for (unsigned i = 0; i < child_count[me]; i++) {
        int status = wait_for(children[me][i]);
        if (status) {
            char text[128];
            int n = snprintf(text, sizeof text, "WRONG: pid %d owner %u: child %d ended with status %x\n", getpid(), me, children[me][i], status);
            (void)!write(2, text, n);
            _exit(96);
        }
    }
    child_count[me] = 0;
}

static void keep_child(pid_t pid) {
    NEED(pid > 0);
    children[me][child_count[me]++] = pid;
    if (child_count[me] == CHILDREN) wait_children();
}

static void *run_thread(void *arg) {
    uintptr_t both = (uintptr_t)arg;
    me = both & 0xff;
    run_list(both >> 8);
    end_ticks();
    wait_children();
    return NULL;
}

static void start_thread(unsigned owner, unsigned n) {
    if (owner % OWNERS == me || leader != me || is_started[owner % OWNERS]) return;
    is_alone = 0;
    is_started[owner % OWNERS] = 1;
    NEED(pthread_create(&threads[owner % OWNERS], NULL, run_thread, (void *)(uintptr_t)(owner % OWNERS | n << 8)) == 0);
}

static void join_threads(void) {
    if (leader != me) return;
    for (unsigned o = 0; o < OWNERS; o++) {
        if (is_started[o]) NEED(pthread_join(threads[o], NULL) == 0);
        is_started[o] = 0;
    }
    is_alone = 1;
}

/* Checks all memory of all owners, of which no other thread runs. */
static void check_everything(void) {
    for (unsigned o = 0; o < OWNERS; o++)
        for (unsigned slot = 0; slot < SLOTS; slot++) {
            struct region *r = &region_table[o][slot];
            for (size_t p = 0; p < r->pages; p++) check_page(r, p);
        }
}

static void finish(void) {
    end_ticks();
    join_threads();
    wait_children();
    check_everything();
}

/* What a child of fork does with what it inherits. */
enum heir { TAKES, CHECKS };

/* Takes over a region that another thread perhaps changed when it was copied. */
static void inherit(struct region *r, unsigned owner, unsigned slot, enum heir heir) {
    int is_partial = 0;
    if (r->is_changing) {
        r->at = NULL, r->pages = 0, r->is_changing = 0;
        return;
    }
    for (size_t p = 0; p < r->pages; p++) {
        struct page *page = &r->page[p];
        is_partial |= page->flags & NOT_IN_CHILD;
        if (page->flags & NOT_IN_CHILD) page->flags |= UNKNOWN;
        else if (page->flags & WIPED_IN_CHILD) *page = (struct page){.flags = page->flags & ~LAZY};
        else if (heir == CHECKS) check_torn_page(r, p);
        if (memcmp(&page->now, &page->next, sizeof page->now)) {
            if (is_writable(page)) fill_page(r, p, NOISE);
            else page->flags |= UNKNOWN;
        }
    }
    if (!is_partial) return;
    unsigned self = me;
    me = owner;
    unmap_region(slot);
    me = self;
}

static void become_child(unsigned n, enum heir heir) {
    depth++;
    leader = me;
    is_alone = 1;
    for (unsigned o = 0; o < OWNERS; o++) {
        is_started[o] = is_sending[o] = child_count[o] = 0;
        /* Its contents differ from those of its parent. */
        next_seed[o] = mix(next_seed[o] * 64ul + n + 1);
        if (o != me) {
            memset(area[o], 0, sizeof area[o]);
            generation[o] = 0;
        }
    }
    for (unsigned o = 0; o < OWNERS; o++)
        for (unsigned slot = 0; slot < SLOTS; slot++) inherit(&region_table[o][slot], o, slot, heir);
    run_list(n);
    finish();
    _exit(0);
}

static void fork_list(unsigned n, enum heir heir) {
    if (depth == DEPTH) return;
    pid_t pid = fork();
    if (pid == 0) become_child(n, heir);
    keep_child(pid);
}

static char *const *arguments_for(unsigned n) {
    static __thread char text[16];
    static __thread char *arguments[3] = {"program"};
    snprintf(text, sizeof text, "%u", n);
    arguments[1] = text;
    return arguments;
}

enum start { SPAWN, FORK_EXEC, VFORK_EXEC };

/* Executes this program anew, for one list. */
static void execute_list(unsigned n, enum start start) {
    char *const *arguments = arguments_for(n);
    pid_t pid = -1;
    if (start == SPAWN) NEED(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ) == 0);
    else if (start == FORK_EXEC) pid = fork();
    else pid = vfork();
    if (pid == 0) {
        execv("/proc/self/exe", arguments);
        _exit(95);
    }
    keep_child(pid);
}

struct borrowed {
    unsigned slot;
    size_t first, count;
};

static int borrow(void *arg) {
    struct borrowed *borrowed = arg;
    check_pages(borrowed->slot, borrowed->first, borrowed->count, SCATTERED);
    write_pages(borrowed->slot, borrowed->first, borrowed->count, SCATTERED, NOISE);
    _exit(0);
}

/* A child of vfork, on a stack of its own, uses this thread's memory. */
static void vfork_pages(unsigned slot, size_t first, size_t count) {
    const size_t len = 64 * PAGE;
    struct borrowed borrowed = {slot, first, count};
    char *stack = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(stack != MAP_FAILED);
    fill(stack, len, new_seed());
    pid_t pid = clone(borrow, stack + len, CLONE_VM | CLONE_VFORK | SIGCHLD, &borrowed);
    NEED(wait_for(pid) == 0);
    NEED(munmap(stack, len) == 0);
}

/* A filter of this thread's own, once. */
static void own_filter(void) {
    static __thread int is_set;
    if (!is_set) NEED(forbid(SYS_acct) == 0);
    is_set = 1;
    NEED(syscall(SYS_acct, "/") == -1 && errno == EPERM);
}

static void pause_for(unsigned microseconds) { usleep(microseconds); }

static void handle(int signal, void (*handler)(int), int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    NEED(sigaction(signal, &action, NULL) == 0);
}

/* Runs the lists of a program, or the one list that the argument names. */
static int run_program(int argc, char **argv, const struct list *all, size_t shared_pages) {
    lists = all;
    is_alone = 1;
    for (unsigned o = 0; o < OWNERS; o++) next_seed[o] = o + 1;
    handle(SIGUSR1, on_signal, SA_ONSTACK | SA_RESTART);
    handle(SIGUSR2, on_tick, SA_ONSTACK | SA_RESTART);
    handle(SIGSEGV, on_segv, SA_NODEFER | SA_ONSTACK);
    map_region(0, argc > 1 ? 64 : shared_pages);
    run_list(argc > 1 ? atoi(argv[1]) : 0);
    finish();
    if (argc > 1) return 0;
    for (unsigned o = 0; o < OWNERS; o++)
        for (unsigned slot = 0; slot < SLOTS; slot++)
            printf("owner %u slot %u: %016lx\n", o, slot, (unsigned long)sum_of(&region_table[o][slot]));
    return 0;
}
