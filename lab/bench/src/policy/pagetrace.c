/* A plugin of qemu-user that records which pages a program touches. `memfold bench policy record` builds and loads it.
 *
 * A reference is dropped if the page is one of the last `filter` pages recorded, and was recorded for writing or is
 * only read now. The others are written to `out`, eight bytes each: page number << 1 | write. At the end, or after `most`
 * references, the mappings of the process are written to `maps`. */
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The part of qemu-plugin.h that is used. Debian does not package that file. */
typedef uint64_t plugin_id;
struct tb;
struct insn;
#define EXPORT __attribute__((visibility("default")))
EXPORT int qemu_plugin_version = 1;
enum { NO_REGISTERS = 0, READS_AND_WRITES = 3 };
size_t qemu_plugin_tb_n_insns(const struct tb *);
struct insn *qemu_plugin_tb_get_insn(const struct tb *, size_t);
bool qemu_plugin_mem_is_store(uint32_t info);
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct tb *));
void qemu_plugin_register_vcpu_mem_cb(struct insn *, void (*)(unsigned, uint32_t, uint64_t, void *), int flags, int rw,
                                      void *);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *);

enum { PAGE_SHIFT = 12, SLOTS = 1 << 16, FILTER_MOST = 1 << 12, BUFFER = 1 << 13 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t slots[SLOTS]; /* The references in the filter, by page; 0 for none. */
static uint64_t ring[FILTER_MOST];
static uint64_t filter = 64, most = UINT64_MAX, recorded;
static uint64_t buffer[BUFFER];
static const char *maps;
static int out = -1;

static void write_all(int fd, const char *bytes, size_t len)
{
    while (len > 0) {
        ssize_t done = write(fd, bytes, len);
        if (done <= 0) {
            perror("pagetrace: write");
            _exit(1);
        }
        bytes += done, len -= done;
    }
}

static void finish(plugin_id id, void *data)
{
    write_all(out, (char *)buffer, recorded % BUFFER * sizeof *buffer);
    int from = open("/proc/self/maps", O_RDONLY), to = open(maps, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    char text[4096];
    ssize_t len;
    while ((len = read(from, text, sizeof text)) > 0)
        write_all(to, text, len);
}

static void touch(unsigned cpu, uint32_t info, uint64_t address, void *data)
{
    uint64_t page = address >> PAGE_SHIFT, reference = page << 1 | qemu_plugin_mem_is_store(info);
    uint64_t *slot = &slots[page % SLOTS];
    /* Another thread may change it meanwhile. Then a reference is recorded twice, or once too seldom. */
    if (*slot >= reference && *slot >> 1 == page)
        return;
    pthread_mutex_lock(&lock);
    uint64_t *oldest = &ring[recorded % filter], *left = &slots[(*oldest >> 1) % SLOTS];
    if (*left == *oldest)
        *left = 0;
    *slot = *oldest = reference;
    buffer[recorded++ % BUFFER] = reference;
    if (recorded % BUFFER == 0)
        write_all(out, (char *)buffer, sizeof buffer);
    if (recorded >= most) {
        finish(0, NULL);
        _exit(0);
    }
    pthread_mutex_unlock(&lock);
}

static void translated(plugin_id id, struct tb *tb)
{
    for (size_t n = 0; n < qemu_plugin_tb_n_insns(tb); n++)
        qemu_plugin_register_vcpu_mem_cb(qemu_plugin_tb_get_insn(tb, n), touch, NO_REGISTERS, READS_AND_WRITES, NULL);
}

EXPORT int qemu_plugin_install(plugin_id id, const void *info, int argc, char **argv)
{
    for (int n = 0; n < argc; n++) {
        char *value = strchr(argv[n], '=');
        if (!value)
            return -1;
        *value++ = 0;
        if (!strcmp(argv[n], "out"))
            out = open(value, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        else if (!strcmp(argv[n], "maps"))
            maps = strdup(value);
        else if (!strcmp(argv[n], "filter"))
            filter = strtoull(value, NULL, 10);
        else if (!strcmp(argv[n], "most"))
            most = strtoull(value, NULL, 10);
    }
    if (out < 0 || !maps || filter < 1 || filter > FILTER_MOST)
        return -1;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, finish, NULL);
    return 0;
}
