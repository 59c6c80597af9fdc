/* Threads. torch's OpenMP runtime is used when the caller hands over its GOMP_parallel: a pool of our own beside
   it would fight for the cores with torch's workers, which spin for a while after each parallel region. Without
   it, threads are made for the call. */
#include "parallel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>

enum { THREADS_MAX = 256 };

typedef void (*gomp_parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
static gomp_parallel_fn gomp_parallel = NULL;

void lamella_set_gomp_parallel(void *function) { gomp_parallel = (gomp_parallel_fn)function; }

typedef struct {
    range_worker worker;
    scratch_worker scratch_worker; /* instead of `worker`, when there is scratch */
    void *job;
    char *scratch;
    int64_t bytes, items, grain;
    _Atomic int64_t next;
    atomic_int joined, status;
} team;

/* Threads take grains until none is left, so the team may have any size. */
static void join_work(void *data) {
    team *t = data;
    char *scratch = t->scratch + atomic_fetch_add(&t->joined, 1) * t->bytes;
    for (;;) {
        const int64_t begin = atomic_fetch_add(&t->next, t->grain);
        if (begin >= t->items || atomic_load(&t->status)) return;
        const int64_t end = begin + t->grain < t->items ? begin + t->grain : t->items;
        const int status = t->worker ? t->worker(t->job, begin, end) : t->scratch_worker(t->job, begin, end, scratch);
        if (status) atomic_store(&t->status, status);
    }
}

static void *thread_main(void *data) {
    join_work(data);
    return NULL;
}

static int run_team(team *t, int threads) {
    const int64_t grains = (t->items + t->grain - 1) / t->grain;
    if (threads > grains) threads = (int)grains;
    if (threads > THREADS_MAX) threads = THREADS_MAX;
    atomic_init(&t->next, 0);
    atomic_init(&t->joined, 0);
    atomic_init(&t->status, 0);
    if (threads <= 1) {
        join_work(t);
    } else if (gomp_parallel) {
        gomp_parallel(join_work, t, (unsigned)threads, 0);
    } else {
        pthread_t ids[THREADS_MAX];
        int started = 0;
        while (started < threads - 1 && !pthread_create(&ids[started], NULL, thread_main, t)) started++;
        join_work(t);
        for (int i = 0; i < started; i++) pthread_join(ids[i], NULL);
    }
    return atomic_load(&t->status);
}

int run_parallel(range_worker worker, void *job, int64_t items, int64_t grain, int threads) {
    if (threads <= 1 || items <= grain) return items ? worker(job, 0, items) : 0;
    static char no_scratch;
    team t = {.worker = worker, .job = job, .items = items, .grain = grain, .scratch = &no_scratch};
    return run_team(&t, threads);
}

int run_parallel_scratch(scratch_worker worker, void *job, int64_t items, int64_t grain, int threads, void *scratch,
                         int64_t bytes) {
    team t = {.scratch_worker = worker, .job = job, .items = items, .grain = grain, .scratch = scratch, .bytes = bytes};
    return run_team(&t, threads);
}
