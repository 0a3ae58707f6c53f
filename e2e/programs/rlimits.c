/* A program sets its own resource limits while it is folded. They hold, and are reported, as
 * without memfold. */
#include "common.h"
#include <sys/resource.h>

#define LEN (64 * UNIT)
#define BOUND (4ul << 30)

static void is_told(int resource, rlim_t soft, rlim_t hard) {
    struct rlimit64 told = {0, 0}, raw[2] = {{0, 0}, {0, 0}};
    NEED(!getrlimit64(resource, &told) && told.rlim_cur == soft && told.rlim_max == hard);
    NEED(!prlimit64(getpid(), resource, NULL, &told) && told.rlim_cur == soft && told.rlim_max == hard);
    NEED(!syscall(SYS_getrlimit, resource, raw) && raw[0].rlim_cur == soft && raw[0].rlim_max == hard);
    NEED(!raw[1].rlim_cur);
    char line[128], value[2][24], wanted[2][24];
    const char *name = resource == RLIMIT_AS ? "Max address space" : resource == RLIMIT_DATA ? "Max data size" : "Max open files";
    FILE *limits = fopen("/proc/self/limits", "r");
    if (!limits) return;
    while (NEED(fgets(line, sizeof line, limits)), strncmp(line, name, strlen(name))) {}
    NEED(sscanf(line + 26, "%20s %20s", value[0], value[1]) == 2 && line[strlen(line) - 1] == '\n');
    for (int i = 0; i < 2; i++) sprintf(wanted[i], (i ? hard : soft) == RLIM64_INFINITY ? "unlimited" : "%lu", i ? hard : soft);
    NEED(!strcmp(value[0], wanted[0]) && !strcmp(value[1], wanted[1]));
    fclose(limits);
}

/* Asserts the limit that an executed program sees. */
static void is_handed_on(const char *flag, rlim_t value) {
    char command[128], line[64] = "";
    snprintf(command, sizeof command, "ulimit -S%s; ulimit -H%s", flag, flag);
    FILE *output = popen(command, "r");
    for (int i = 0; i < 2; i++) NEED(fgets(line, sizeof line, output) && strtoull(line, NULL, 10) == value);
    NEED(!pclose(output));
}

static char *folded(void) {
    char *p = map(LEN);
    fill(p, LEN, 1);
    check(p, LEN, 1);
    return p;
}

static void addresses(int resource, const char *flag) {
    char *p = folded();
    struct rlimit before, limit = {BOUND, BOUND}, wrong = {2, 1}, higher = {BOUND, 2 * BOUND};
    NEED(!getrlimit(resource, &before));
    NEED(setrlimit(resource, &wrong) && errno == EINVAL);
    is_told(resource, before.rlim_cur, before.rlim_max);
    struct rlimit64 asked = {BOUND, BOUND}, old;
    NEED(!prlimit64(0, resource, &asked, &old) && old.rlim_cur == before.rlim_cur && old.rlim_max == before.rlim_max);
    is_told(resource, BOUND, BOUND);
    NEED(!setrlimit(resource, &limit));
    if (geteuid()) NEED(setrlimit(resource, &higher) && errno == EPERM);
    /* Memory can be mapped below the limit, and not beyond it. */
    for (int i = 0; i < 20; i++) {
        char *more = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        NEED(more != MAP_FAILED);
        fill(more, LEN, i);
        check(more, LEN, i);
        NEED(!munmap(more, LEN));
    }
    NEED(mmap(NULL, BOUND, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) == MAP_FAILED && errno == ENOMEM);
    check(p, LEN, 1);
    is_handed_on(flag, BOUND >> 10);
    char *no[] = {"/nonexistent", NULL};
    NEED(execv(no[0], no) && errno == ENOENT);
    NEED(execv("/etc/passwd", no) && errno == EACCES);
    pid_t child = fork();
    if (!child) {
        is_told(resource, BOUND, BOUND);
        fill(p, LEN, 2);
        check(p, LEN, 2);
        _exit(0);
    }
    NEED(!wait_for(child));
    check(p, LEN, 1);
    limit.rlim_cur = BOUND / 2;
    NEED(!setrlimit(resource, &limit));
    is_told(resource, BOUND / 2, BOUND);
}

static void as(void) { addresses(RLIMIT_AS, "v"); }
static void data(void) { addresses(RLIMIT_DATA, "d"); }

static void nofile(void) {
    char *p = folded();
    struct rlimit limit = {64, 64};
    NEED(!setrlimit(RLIMIT_NOFILE, &limit));
    is_told(RLIMIT_NOFILE, 64, 64);
    is_handed_on("n", 64);
    int count = 0, fd;
    while ((fd = open("/dev/null", O_RDONLY)) >= 0) NEED(fd < 64), count++;
    NEED(errno == EMFILE && count > 40);
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        if (!child) {
            is_told(RLIMIT_NOFILE, 64, 64);
            NEED(open("/dev/null", O_RDONLY) < 0 && errno == EMFILE);
            check(p, LEN, 1);
            fill(p, LEN, 2);
            check(p, LEN, 2);
            /* Some of it is not resident. */
            unsigned long pages = 0, size;
            close(63);
            FILE *statm = fopen("/proc/self/statm", "r");
            NEED(statm && fscanf(statm, "%lu %lu", &size, &pages) == 2 && pages * PAGE < LEN);
            _exit(0);
        }
        NEED(!wait_for(child));
    }
    check(p, LEN, 1);
}

int main(int argc, char **argv) {
    static const struct test all[] = {{"as", as}, {"data", data}, {"nofile", nofile}};
    return RUN_NAMED(argc, argv, all);
}
