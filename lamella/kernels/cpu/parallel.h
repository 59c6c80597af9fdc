/* Splits a range over threads. */
#ifndef LAMELLA_PARALLEL_H
#define LAMELLA_PARALLEL_H

#include <stdint.h>

/* Works on items [begin, end); returns 0, or a status that stops the rest. */
typedef int (*range_worker)(void *job, int64_t begin, int64_t end);

/* First non-zero status, else 0. `grain` items go to a thread at a time. */
int run_parallel(range_worker worker, void *job, int64_t items, int64_t grain, int threads);

/* The same for a worker that needs scratch: each thread gets its own `bytes` of `scratch`, which holds
   `threads` times `bytes`. Contents are whatever the grain before left. */
typedef int (*scratch_worker)(void *job, int64_t begin, int64_t end, void *scratch);
int run_parallel_scratch(scratch_worker worker, void *job, int64_t items, int64_t grain, int threads, void *scratch,
                         int64_t bytes);

#endif
