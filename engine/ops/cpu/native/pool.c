/* One pool of threads for all kernels.
 *
 * A job is open while ``generation`` is odd. A worker that sees an odd generation enters (``inside``), looks again whether
 * that job is still open, takes pieces until none is left, and leaves. The caller does the same, then closes the job and
 * waits only for the workers that are inside: one that sleeps or has lost its core costs nothing, since its pieces were taken
 * by the others.
 *
 * Each thread begins with a stretch of pieces of its own and helps with the others' when that is done. So it reads memory
 * in order, as the hardware's prefetchers like it: where two threads take every other 16 KiB, each waits anew at every piece.
 *
 * Workers wait actively for a moment after each job, because a decoder's next product comes within microseconds; then they
 * sleep until the next job wakes them. No thread is pinned: the window's threads need the cores too.
 */
#include "os.h"
#include "rl.h"

#include <immintrin.h>
#include <stdatomic.h>

#define MAX_WORKERS 255
#define SPIN_NANOSECONDS 60000

static struct {
    _Alignas(64) atomic_uint_fast64_t generation;
    struct {
        _Alignas(64) atomic_int_fast64_t next;
        int64_t end;
    } stretch[MAX_WORKERS + 1]; /* by thread, the caller first */
    int num_stretches;
    _Alignas(64) atomic_int inside;
    _Alignas(64) atomic_int sleepers;
    atomic_int num_wanted; /* workers, the caller not counted */
    rl_piece_fn fn;
    void *arg;
    os_thread threads[MAX_WORKERS];
    int num_started;
} pool;

static os_lock run_lock = OS_LOCK_INIT; /* held by the thread whose job is open, and while the pool changes size */
static os_lock sleep_lock = OS_LOCK_INIT;
static os_condition wake = OS_CONDITION_INIT;

static void lay_out_stretches(int64_t num_pieces) {
    int64_t count = rl_pool_threads(), from = 0;
    pool.num_stretches = (int)count;
    for (int64_t i = 0; i < count; i++) {
        atomic_store_explicit(&pool.stretch[i].next, from, memory_order_relaxed);
        pool.stretch[i].end = from = num_pieces / count * (i + 1) + num_pieces % count * (i + 1) / count;
    }
}

/* All pieces that are left, those of the stretch ``own`` first. */
static void take_pieces(int own) {
    for (int i = 0; i < pool.num_stretches; i++) {
        int index = (own + i) % pool.num_stretches;
        int64_t end = pool.stretch[index].end;
        atomic_int_fast64_t *next = &pool.stretch[index].next;
        while (atomic_load_explicit(next, memory_order_relaxed) < end) {
            int64_t piece = atomic_fetch_add_explicit(next, 1, memory_order_relaxed);
            if (piece < end)
                pool.fn(pool.arg, piece);
        }
    }
}

/* Wait until a job other than ``seen`` is open or this worker is wanted no more; the generation then. */
static uint_fast64_t wait_for_job(uint_fast64_t seen, int index) {
    int64_t until = os_nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 64; i++) {
            uint_fast64_t now = atomic_load(&pool.generation);
            if ((now != seen && (now & 1)) || index >= atomic_load_explicit(&pool.num_wanted, memory_order_relaxed))
                return now;
            _mm_pause();
        }
    } while (os_nanoseconds() < until);

    os_acquire(&sleep_lock);
    atomic_fetch_add(&pool.sleepers, 1);
    uint_fast64_t now;
    while (now = atomic_load(&pool.generation), (now == seen || !(now & 1)) && index < atomic_load(&pool.num_wanted))
        os_wait(&wake, &sleep_lock);
    atomic_fetch_sub(&pool.sleepers, 1);
    os_release(&sleep_lock);
    return now;
}

static OS_THREAD_RESULT work(void *arg) {
    int index = (int)(intptr_t)arg;
    uint_fast64_t seen = 0;
    while (index < atomic_load(&pool.num_wanted)) {
        uint_fast64_t now = wait_for_job(seen, index);
        if (!(now & 1))
            continue;
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.generation) == now) /* still open, and the caller will wait for us */
            take_pieces(index + 1);
        atomic_fetch_sub(&pool.inside, 1);
        seen = now;
    }
    return 0;
}

static void wake_sleepers(void) {
    if (atomic_load(&pool.sleepers) == 0)
        return;
    os_acquire(&sleep_lock);
    os_wake_all(&wake);
    os_release(&sleep_lock);
}

static void wait_for_workers(void) {
    int64_t until = os_nanoseconds() + SPIN_NANOSECONDS;
    while (atomic_load(&pool.inside) != 0) {
        if (os_nanoseconds() < until)
            _mm_pause();
        else
            os_yield(); /* a worker lost its core in the middle of a piece */
    }
}

void rl_pool_run(rl_piece_fn fn, void *arg, int64_t num_pieces) {
    if (num_pieces <= 1 || atomic_load_explicit(&pool.num_wanted, memory_order_relaxed) == 0 || !os_try_acquire(&run_lock)) {
        for (int64_t piece = 0; piece < num_pieces; piece++)
            fn(arg, piece);
        return;
    }
    pool.fn = fn;
    pool.arg = arg;
    lay_out_stretches(num_pieces);
    atomic_fetch_add(&pool.generation, 1); /* open */
    wake_sleepers();
    take_pieces(0);
    atomic_fetch_add(&pool.generation, 1); /* closed */
    wait_for_workers();
    os_release(&run_lock);
}

int64_t rl_pool_threads(void) { return 1 + atomic_load_explicit(&pool.num_wanted, memory_order_relaxed); }

#ifndef _WIN32
/* A forked child has none of the threads: it works alone until it sets its own number. */
static void forget_threads(void) {
    pool.num_started = 0;
    atomic_store(&pool.num_wanted, 0);
    atomic_store(&pool.inside, 0);
    atomic_store(&pool.sleepers, 0);
    run_lock = sleep_lock = (os_lock)OS_LOCK_INIT;
    wake = (os_condition)OS_CONDITION_INIT;
}
#endif

/* Let ``num_threads`` threads work, the caller included (0 and below count as 1). Returns how many there are: fewer when
 * the system starts no more. */
RL_API int64_t rl_set_threads(int64_t num_threads) {
#ifndef _WIN32
    static atomic_flag watches_forks = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&watches_forks))
        pthread_atfork(NULL, NULL, forget_threads);
#endif
    int wanted = num_threads < 1 ? 0 : num_threads > MAX_WORKERS ? MAX_WORKERS : (int)num_threads - 1;
    os_acquire(&run_lock);
    os_acquire(&sleep_lock);
    atomic_store(&pool.num_wanted, wanted);
    os_wake_all(&wake);
    os_release(&sleep_lock);
    while (pool.num_started > wanted)
        os_join(pool.threads[--pool.num_started]);
    while (pool.num_started < wanted) {
        if (!os_start(&pool.threads[pool.num_started], work, (void *)(intptr_t)pool.num_started)) {
            atomic_store(&pool.num_wanted, pool.num_started);
            break;
        }
        pool.num_started++;
    }
    os_release(&run_lock);
    return 1 + pool.num_started;
}
