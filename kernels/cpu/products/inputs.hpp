// Input preparation: the representations that a matrix reads, and the conversion of float rows to them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/codes.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Returns the input representations that a product with this matrix reads.
static InputForms input_forms(const Matrix& m, int input_bits) {
  const bool bytes = input_bits == 8 && m.has_codes();
  const bool pairs = !bytes && takes_pairs(m.format), words = !KVFERRY_PAIRS && m.has_codes();
  const bool sums = pairs && m.has_codes() && (adds_minimum(m) || (KVFERRY_AMX && m.format == Format::codes4));
  return {!pairs, pairs, sums, bytes, words, words && input_bits == 32};  // integers are quantized from f32
}

// Quantizes group `group` (32 inputs) of a row from f32 to bytes, or to words (and low words) if bytes are not stored.
static inline void quantize_group(const Rows& rows, int row, int group) {
  const size_t at = size_t(row) * rows.stride + size_t(group) * kGroup;
  const V a = v_load(rows.f32 + at), b = v_load(rows.f32 + at + 16);
  const float max_code = rows.forms.bytes ? 127.0f : 32767.0f;
  const float top = v_reduce_max(v_max(v_max(a, v_sub(v_zero(), a)), v_max(b, v_sub(v_zero(), b))));
  // Tiny magnitudes have no finite inverse and are quantized to zero. The last term is NaN if any input is not finite.
  const float inverse = top > 1e-30f ? max_code / top : 0.0f;
  const float step = top / max_code + 0.0f * (v_reduce_add(a) + v_reduce_add(b));
  rows.scales[at / kGroup] = step;
  float whole_sum = 0.0f;
  for (int half = 0; half < 2; ++half) {
    const V scaled = v_mul(half ? b : a, v_set(inverse));
    // NaN is clamped to a number here; the scale is NaN
    const V whole = v_round(v_max(v_min(scaled, v_set(max_code)), v_set(-max_code)));
    float sum = v_reduce_add(whole);
    if (rows.forms.bytes) {
      v_store_int8_quads(rows.bytes + at + 16 * half, whole);
      rows.byte_sums[at / kSumWidth + half] = int32_t(sum);
    }
#if !KVFERRY_PAIRS
    v_store_int16(rows.words + at + 16 * half, whole);
    if (rows.forms.low_words) {
      const V low =
          v_round(v_max(v_min(v_mul(v_sub(scaled, whole), v_set(kLowWordSteps)), v_set(max_code)), v_set(-max_code)));
      v_store_int16(rows.low_words + at + 16 * half, low);
      sum += v_reduce_add(low) / kLowWordSteps;
    }
#endif
    rows.half_sums[at / kSumWidth + half] = step * sum;
    whole_sum += sum;
  }
  rows.group_sums[at / kGroup] = step * whole_sum;
}

// Stores 16 inputs in every stored representation, with their sum. The second half of a group completes the group.
static inline void store_input(const Rows& rows, int row, int input, V v) {
  const size_t at = size_t(row) * rows.stride + size_t(input);
  if (rows.forms.f32) v_store(rows.f32 + at, v);
  if (rows.forms.bf16) v_store_bf16(rows.bf16 + at, v);
  if (rows.forms.sums) {
    if (rows.forms.bf16) v = v_load_bf16(rows.bf16 + at);
    rows.half_sums[at / kSumWidth] = v_reduce_add(v);
    if (input % kGroup != 0)
      rows.group_sums[at / kGroup] = rows.half_sums[at / kSumWidth - 1] + rows.half_sums[at / kSumWidth];
  }
  if (rows.forms.are_quantized() && input % kGroup != 0) quantize_group(rows, row, input / kGroup);
}

// Stores a row of inputs; `values` may alias the row's f32.
static inline void write_input(const Rows& rows, int row, int n, const float* values) {
  for (int i = 0; i < rows.stride; i += kSumWidth) {
    V v = v_zero();
    if (i + kSumWidth <= n) {
      v = v_load(values + i);
    } else if (i < n) {
      alignas(64) float tail[kSumWidth] = {};
      for (int j = i; j < n; ++j) tail[j - i] = values[j];
      v = v_load(tail);
    }
    store_input(rows, row, i, v);
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
