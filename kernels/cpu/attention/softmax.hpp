// Online softmax: state of a partition, and merge of two partitions.
#pragma once
#include <cstddef>

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

// Merges the sinks of the rows' heads, which are scores without a value, into the state of `rows` rows: head i belongs
// to rows i, i + group, i + 2 group and so on. `values` is [rows][width].
static inline void add_sinks(const float* sinks, int group, float* max_score, float* sums, float* values, int rows,
                             int width) {
  for (int first = 0; first < rows; first += 16) {
    const int count = rows - first < 16 ? rows - first : 16;
    Softmax all, sink;
    alignas(64) float keep[16], take[16];
    for (int r = 0; r < count; ++r) {
      all.max_score[r] = max_score[first + r];
      all.sums[r] = sums[first + r];
      sink.max_score[r] = sinks[(first + r) % group];
      sink.sums[r] = 1.0f;
    }
    merge_sums(all, sink, keep, take);
    for (int r = 0; r < count; ++r) {
      max_score[first + r] = all.max_score[r];
      sums[first + r] = all.sums[r];
      float* of_row = values + size_t(first + r) * size_t(width);
      for (int d = 0; d < width; d += 16) v_store(of_row + d, v_mul(v_load(of_row + d), v_set(keep[r])));
    }
  }
}

static inline void merge_values(float* all, const float* further, float keep, float take, int width) {
  const V k = v_set(keep), t = v_set(take);
  for (int d = 0; d < width; d += 16) v_store(all + d, v_fma(v_load(all + d), k, v_mul(v_load(further + d), t)));
}

}  // namespace kvferry::KVFERRY_LEVEL
