/* Preloaded into a process, it shifts the wall clock by OFF_S seconds; the monotonic clock stays as it is.

   A deadline on the wall clock is shifted back before the kernel sees it, so that a wait of one second takes one.
   Times of files come from the kernel and are right. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>

#define WALL_S 1000000000 /* Earlier deadlines are those of the monotonic clock, which begins with the machine. */
#define NEXT(name)                       \
    static __typeof__(&name) next;       \
    if (!next)                           \
        next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

typedef const struct timespec *deadline;

static deadline shifted_back(deadline given, struct timespec *room) {
    if (!given || given->tv_sec < WALL_S)
        return given;
    *room = (struct timespec){given->tv_sec - OFF_S, given->tv_nsec};
    return room;
}

static clockid_t clock_of(deadline given) {
    return given->tv_sec < WALL_S ? CLOCK_MONOTONIC : CLOCK_REALTIME;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    NEXT(clock_gettime);
    int error = next(clock, now);
    if (!error && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += OFF_S;
    return error;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    NEXT(gettimeofday);
    int error = next(now, zone);
    if (!error)
        now->tv_sec += OFF_S;
    return error;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    if (kept)
        *kept = now.tv_sec;
    return now.tv_sec;
}

int clock_nanosleep(clockid_t clock, int flags, deadline until, struct timespec *left) {
    NEXT(clock_nanosleep);
    struct timespec room;
    return next(clock, flags, flags & TIMER_ABSTIME ? shifted_back(until, &room) : until, left);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, deadline until) {
    NEXT(pthread_cond_clockwait);
    struct timespec room;
    return next(cond, mutex, clock, shifted_back(until, &room));
}

int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, deadline until) {
    return pthread_cond_clockwait(cond, mutex, clock_of(until), until);
}

int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, deadline until) {
    NEXT(pthread_mutex_clocklock);
    struct timespec room;
    return next(mutex, clock, shifted_back(until, &room));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, deadline until) {
    return pthread_mutex_clocklock(mutex, CLOCK_REALTIME, until);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, deadline until) {
    NEXT(sem_clockwait);
    struct timespec room;
    return next(semaphore, clock, shifted_back(until, &room));
}

int sem_timedwait(sem_t *semaphore, deadline until) {
    return sem_clockwait(semaphore, CLOCK_REALTIME, until);
}

long syscall(long number, ...) {
    NEXT(syscall);
    long words[6];
    struct timespec room;
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++)
        words[i] = va_arg(rest, long);
    va_end(rest);
    if (number == SYS_clock_gettime)
        return clock_gettime(words[0], (struct timespec *)words[1]);
    if (number == SYS_futex && words[1] & FUTEX_CLOCK_REALTIME)
        words[3] = (long)shifted_back((deadline)words[3], &room);
    return next(number, words[0], words[1], words[2], words[3], words[4], words[5]);
}
