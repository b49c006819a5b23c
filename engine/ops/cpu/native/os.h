/* The few things of an operating system that the pool needs: threads, a lock, a condition, a clock. */
#ifndef RL_OS_H
#define RL_OS_H

#include <stdint.h>

#ifdef _WIN32

#define WIN32_LEAN_AND_MEAN
#include <windows.h>

typedef HANDLE os_thread;
typedef SRWLOCK os_lock;
typedef CONDITION_VARIABLE os_condition;
#define OS_LOCK_INIT SRWLOCK_INIT
#define OS_CONDITION_INIT CONDITION_VARIABLE_INIT
#define OS_THREAD_RESULT DWORD WINAPI
typedef LPTHREAD_START_ROUTINE os_thread_fn;

static inline int os_start(os_thread *thread, os_thread_fn fn, void *arg) {
    *thread = CreateThread(NULL, 0, fn, arg, 0, NULL);
    return *thread != NULL;
}
static inline void os_join(os_thread thread) {
    WaitForSingleObject(thread, INFINITE);
    CloseHandle(thread);
}
static inline void os_acquire(os_lock *lock) { AcquireSRWLockExclusive(lock); }
static inline int os_try_acquire(os_lock *lock) { return TryAcquireSRWLockExclusive(lock) != 0; }
static inline void os_release(os_lock *lock) { ReleaseSRWLockExclusive(lock); }
static inline void os_wait(os_condition *condition, os_lock *lock) {
    SleepConditionVariableSRW(condition, lock, INFINITE, 0);
}
static inline void os_wake_all(os_condition *condition) { WakeAllConditionVariable(condition); }
static inline void os_yield(void) { SwitchToThread(); }
static inline int64_t os_nanoseconds(void) {
    LARGE_INTEGER now, frequency;
    QueryPerformanceCounter(&now);
    QueryPerformanceFrequency(&frequency);
    return (int64_t)((double)now.QuadPart * 1e9 / (double)frequency.QuadPart);
}

#else

#include <pthread.h>
#include <sched.h>
#include <time.h>

typedef pthread_t os_thread;
typedef pthread_mutex_t os_lock;
typedef pthread_cond_t os_condition;
#define OS_LOCK_INIT PTHREAD_MUTEX_INITIALIZER
#define OS_CONDITION_INIT PTHREAD_COND_INITIALIZER
#define OS_THREAD_RESULT void *
typedef void *(*os_thread_fn)(void *);

static inline int os_start(os_thread *thread, os_thread_fn fn, void *arg) {
    return pthread_create(thread, NULL, fn, arg) == 0;
}
static inline void os_join(os_thread thread) { pthread_join(thread, NULL); }
static inline void os_acquire(os_lock *lock) { pthread_mutex_lock(lock); }
static inline int os_try_acquire(os_lock *lock) { return pthread_mutex_trylock(lock) == 0; }
static inline void os_release(os_lock *lock) { pthread_mutex_unlock(lock); }
static inline void os_wait(os_condition *condition, os_lock *lock) { pthread_cond_wait(condition, lock); }
static inline void os_wake_all(os_condition *condition) { pthread_cond_broadcast(condition); }
static inline void os_yield(void) { sched_yield(); }
static inline int64_t os_nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif
#endif
