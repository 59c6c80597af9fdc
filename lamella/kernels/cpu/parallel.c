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
    void *job;
    int64_t items, grain;
    _Atomic int64_t next;
    atomic_int status;
} team;

/* Threads take grains until none is left, so the team may have any size. */
static void join_work(void *data) {
    team *t = data;
    for (;;) {
        const int64_t begin = atomic_fetch_add(&t->next, t->grain);
        if (begin >= t->items || atomic_load(&t->status)) return;
        const int64_t end = begin + t->grain < t->items ? begin + t->grain : t->items;
        const int status = t->worker(t->job, begin, end);
        if (status) atomic_store(&t->status, status);
    }
}

static void *thread_main(void *data) {
    join_work(data);
    return NULL;
}

int run_parallel(range_worker worker, void *job, int64_t items, int64_t grain, int threads) {
    const int64_t grains = (items + grain - 1) / grain;
    if (threads > grains) threads = (int)grains;
    if (threads > THREADS_MAX) threads = THREADS_MAX;
    if (threads <= 1) return items ? worker(job, 0, items) : 0;
    team t = {.worker = worker, .job = job, .items = items, .grain = grain};
    atomic_init(&t.next, 0);
    atomic_init(&t.status, 0);
    if (gomp_parallel) {
        gomp_parallel(join_work, &t, (unsigned)threads, 0);
    } else {
        pthread_t ids[THREADS_MAX];
        int started = 0;
        while (started < threads - 1 && !pthread_create(&ids[started], NULL, thread_main, &t)) started++;
        join_work(&t);
        for (int i = 0; i < started; i++) pthread_join(ids[i], NULL);
    }
    return atomic_load(&t.status);
}
