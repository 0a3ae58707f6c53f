/* A user whom the system gives no userfaultfd is told so, and what to do; delivery=signal needs none, and is the default. */
#include "test.h"
#include <unistd.h>

enum { NOBODY = 65534, BYTES = 40 << 20 };

/* Whether the system gives one to everybody, or to this user by the device. */
static int is_given(void) {
    int allowed = 0;
    FILE *setting = fopen("/proc/sys/vm/unprivileged_userfaultfd", "r");
    if (setting) {
        allowed = fgetc(setting) == '1';
        fclose(setting);
    }
    return allowed || access("/dev/userfaultfd", R_OK | W_OK) == 0;
}

int main(void) {
    memfold_t memory = 0;
    void *at;
    if (geteuid() == 0) {
        CHECK(setgid(NOBODY) == 0);
        CHECK(setuid(NOBODY) == 0);
    }
    if (is_given()) {
        puts("permission: left out, as every user here has userfaultfd");
        return 0;
    }
    REFUSED(memfold_create("limit=20M delivery=thread", &memory), NO_PERMISSION, "vm.unprivileged_userfaultfd=1");
    REFUSED(memfold_create("limit=20M delivery=thread", &memory), NO_PERMISSION, "or give delivery=signal");
    CHECK(memory == 0);
    OK(memfold_create("limit=20M delivery=signal", &memory));
    OK(memfold_destroy(memory));
    OK(memfold_create("limit=20M", &memory));
    OK(memfold_map(memory, BYTES, &at));
    unsigned *numbers = at;
    for (unsigned i = 0; i < BYTES / sizeof *numbers; i++) numbers[i] = i / 64;
    for (unsigned i = 0; i < BYTES / sizeof *numbers; i++) CHECK(numbers[i] == i / 64);
    memfold_stats_t stats;
    OK(memfold_stats(memory, &stats, sizeof stats));
    CHECK(stats.folded_bytes > 0);
    OK(memfold_destroy(memory));
    return 0;
}
