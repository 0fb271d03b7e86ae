/* The time of day as a file tells it: loaded before libc's by processes whose wall clock is to be off. The file holds three
 * numbers of 64 bits: nanoseconds to add, parts of a million to go faster by, and since when. Monotonic clocks stay, and so
 * does how long a wait takes: its end, which was reckoned by what is shown, is told to the kernel by the true time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
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

static long long shift(long long true_ns)
{
    return told ? told[0] + (true_ns - told[2]) * told[1] / 1000000 : 0;
}

static int truly(clockid_t which, struct timespec *now)
{
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    return real(which, now);
}

static struct timespec moved(const struct timespec *when, long long by)
{
    long long ns = when->tv_sec * SECOND + when->tv_nsec + by;
    struct timespec to = {.tv_sec = ns / SECOND, .tv_nsec = ns % SECOND};
    return to;
}

int clock_gettime(clockid_t which, struct timespec *now)
{
    int failed = truly(which, now);
    if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE))
        *now = moved(now, shift(now->tv_sec * SECOND + now->tv_nsec));
    return failed;
}

/* The true end of a wait that ends when the shown clock says so. By a monotonic clock, which counts from boot, it is true. */
static struct timespec truth(const struct timespec *end)
{
    if (end->tv_sec < SECOND)
        return *end;
    struct timespec now;
    truly(CLOCK_REALTIME, &now);
    return moved(end, -shift(now.tv_sec * SECOND + now.tv_nsec));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *end)
{
    static int (*wait)(pthread_mutex_t *, const struct timespec *);
    if (!wait)
        wait = (int (*)(pthread_mutex_t *, const struct timespec *))dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    struct timespec at = truth(end);
    return wait(mutex, &at);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *end)
{
    static int (*wait)(sem_t *, const struct timespec *);
    if (!wait)
        wait = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec at = truth(end);
    return wait(semaphore, &at);
}

/* Of two in libc the one that today's programs are linked with: plain dlsym may find that of another age. */
static void *newest(const char *name)
{
    void *found = dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2");
    return found ? found : dlsym(RTLD_NEXT, name);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end)
{
    static int (*wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!wait)
        wait = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))newest("pthread_cond_timedwait");
    struct timespec at = truth(end);
    return wait(condition, mutex, &at);
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
