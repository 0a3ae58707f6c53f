/* Calls that fail, often enough that their sites in libc are rewritten: each goes on to where libc
 * sets errno. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sched.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define TRY(call)                                          \
    do {                                                   \
        int sum = 0;                                       \
        for (int n = 0; n < 40; n++) {                     \
            errno = 0;                                     \
            sum += (call) == -1 ? errno : -1000;           \
        }                                                  \
        printf("%s: %d\n", #call, sum);                    \
    } while (0)

int main(void) {
    cpu_set_t set;
    struct stat status;
    struct timespec none = {0, -1};
    struct epoll_event event;
    char byte;
    CPU_ZERO(&set);
    TRY(sched_getaffinity(-1, sizeof set, &set));
    TRY(sched_getaffinity(0, 0, &set));
    TRY(sched_setaffinity(0, sizeof set, &set));
    TRY(sched_getscheduler(-1));
    TRY(read(-1, &byte, 1));
    TRY(write(-1, &byte, 1));
    TRY(pread(-1, &byte, 1, 0));
    TRY(close(-1));
    TRY(dup(-1));
    TRY(lseek(-1, 0, SEEK_SET));
    TRY(fcntl(-1, F_GETFD));
    TRY(fstat(-1, &status));
    TRY(openat(AT_FDCWD, "/no/such/file", O_RDONLY));
    TRY(readlink("/no/such/file", &byte, 1));
    TRY(unlink("/no/such/file"));
    TRY(getpriority(PRIO_PROCESS, -1));
    TRY(getsockname(-1, (struct sockaddr *)&status, &(socklen_t){sizeof status}));
    TRY(recv(-1, &byte, 1, 0));
    TRY(send(-1, &byte, 1, 0));
    TRY(epoll_wait(-1, &event, 1, 0));
    TRY(munmap((void *)1, 1));
    TRY(msync((void *)1, 1, 0));
    TRY(nanosleep(&none, NULL));
    TRY(ftruncate(-1, 0));
    TRY(fsync(-1));
    TRY(kill(-1000000, 0));
    puts("failed as ever");
    return 0;
}
