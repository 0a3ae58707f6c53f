/* Calls that memfold refuses. Each is made twice, because memfold must warn once. */
#include "common.h"
#include "filtered.h"
#include <setjmp.h>
#include <sys/ioctl.h>

static void io_uring(void) {
    char params[120] = {0};
    for (int i = 0; i < 2; i++) NEED(syscall(SYS_io_uring_setup, 8, params) == -1 && errno == ENOSYS);
}

static void aio(void) {
    unsigned long context = 0;
    for (int i = 0; i < 2; i++) NEED(syscall(SYS_io_setup, 8, &context) == -1 && errno == ENOSYS);
}

static sigjmp_buf out;
static void has_none(int signal) { siglongjmp(out, 1); }

static void int80(void) {
    signal(SIGSEGV, has_none);
    if (sigsetjmp(out, 1)) {
        puts("none");
        exit(0);
    }
    for (int i = 0; i < 2; i++) {
        long result;
        __asm__ volatile("int $0x80" : "=a"(result) : "a"(20) : "memory", "r8", "r9", "r10", "r11");
        NEED(result == -ENOSYS);
    }
}

/* Only the request's number counts. The device need not exist. */
static void given(unsigned long request) {
    uint64_t about[8] = {0};
    for (int i = 0; i < 2; i++) NEED(ioctl(0, request, about) == -1);
}
static void kvm(void) { given(0x4020ae46); }
static void vfio(void) { given(0x3b71); }
static void vhost(void) { given(0x4008af03); }
static void userfaultfd(void) { given(0xc020aa00); }

static void *nothing(void *none) { return NULL; }

/* A filter that refuses prctl: threads and children that are started after it run as plainly. */
static void filter(void) {
    NEED(forbid(SYS_prctl) == 0);
    pid_t pid = fork();
    if (pid == 0) _exit(3);
    NEED(WEXITSTATUS(wait_for(pid)) == 3);
    pthread_t thread;
    NEED(pthread_create(&thread, NULL, nothing, NULL) == 0 && pthread_join(thread, NULL) == 0);
}

int main(int argc, char **argv) {
    static const struct test all[] = {
        {"io_uring", io_uring}, {"aio", aio},     {"int80", int80},   {"kvm", kvm},
        {"vfio", vfio},         {"vhost", vhost}, {"filter", filter}, {"userfaultfd", userfaultfd},
    };
    return RUN_NAMED(argc, argv, all);
}
