// Online softmax: state of a partition, and merge of two partitions.
#pragma once
#include "simd/math.hpp"
#include "simd/simd.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Maximum score and sum of weights of up to 16 rows, one row per lane.
struct Softmax {
  alignas(64) float max_score[16] = {}, sums[16] = {};
};

// Merges partition `further` into `all`. `keep` and `take` are the factors by which the weighted values of `all` and of
// `further` are rescaled to the new maximum.
static inline void merge_sums(Softmax& all, const Softmax& further, float keep[16], float take[16]) {
  const V before = v_load(all.max_score), after = v_load(further.max_score), top = v_max(before, after);
  const V k = v_exp(v_sub(before, top)), t = v_exp(v_sub(after, top));
  v_store(keep, k);
  v_store(take, t);
  v_store(all.sums, v_fma(v_load(all.sums), k, v_mul(v_load(further.sums), t)));
  v_store(all.max_score, top);
}

static inline void merge_values(float* all, const float* further, float keep, float take, int width) {
  const V k = v_set(keep), t = v_set(take);
  for (int d = 0; d < width; d += 16) v_store(all + d, v_fma(v_load(all + d), k, v_mul(v_load(further + d), t)));
}

}  // namespace kvferry::KVFERRY_LEVEL
