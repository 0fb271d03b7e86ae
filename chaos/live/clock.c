/* The time of day as a file tells it: loaded before libc's by processes whose wall clock is to be off. The file holds three
 * numbers of 64 bits: nanoseconds to add, parts of a million to go faster by, and since when. Monotonic clocks stay. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static int (*real)(clockid_t, struct timespec *);
static const volatile long long *told;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("FALSE_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *map = fd < 0 ? MAP_FAILED : mmap(NULL, 3 * sizeof *told, PROT_READ, MAP_SHARED, fd, 0);
    if (fd >= 0)
        close(fd);
    if (map != MAP_FAILED)
        told = map;
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(which, now);
    if (failed || !told || (which != CLOCK_REALTIME && which != CLOCK_REALTIME_COARSE))
        return failed;
    long long true_ns = now->tv_sec * SECOND + now->tv_nsec;
    long long shown = true_ns + told[0] + (true_ns - told[2]) * told[1] / 1000000;
    now->tv_sec = shown / SECOND;
    now->tv_nsec = shown % SECOND;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec shown;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &shown))
        return -1;
    now->tv_sec = shown.tv_sec;
    now->tv_usec = shown.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into)
{
    struct timespec shown;
    clock_gettime(CLOCK_REALTIME_COARSE, &shown);
    if (into)
        *into = shown.tv_sec;
    return shown.tv_sec;
}
