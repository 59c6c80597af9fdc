/* Sorting tokens by expert. */
#include <stdint.h>
#include <string.h>

/* Counting sort of `pairs` (token, choice) pairs by expert, stable; of experts first .. first + experts - 1 alone, others
   have no row. offsets [experts + 1]: first row of each expert; token [pairs]: token of each row; slot [pairs]: row of each
   pair, or -1; weight_rows [pairs]: the pair's weight at its row. Returns 0, or 1 when an index is not in 0 .. total - 1. */
int lamella_experts_route(const int64_t *index, const float *weight, int64_t pairs, int64_t per_token, int64_t first,
                          int64_t experts, int64_t total, int32_t *offsets, int32_t *token, int32_t *slot,
                          float *weight_rows) {
    memset(offsets, 0, (size_t)(experts + 1) * sizeof(*offsets));
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t e = index[i] - first;
        if (index[i] < 0 || index[i] >= total) return 1;
        if (e >= 0 && e < experts) offsets[e + 1]++;
    }
    for (int64_t e = 0; e < experts; e++) offsets[e + 1] += offsets[e];
    for (int64_t i = 0; i < pairs; i++) {
        const int64_t e = index[i] - first;
        if (e < 0 || e >= experts) {
            slot[i] = -1;
            continue;
        }
        const int32_t row = offsets[e]++;
        token[row] = (int32_t)(i / per_token);
        slot[i] = row;
        weight_rows[row] = weight[i];
    }
    memmove(offsets + 1, offsets, (size_t)experts * sizeof(*offsets));
    offsets[0] = 0;
    return 0;
}
