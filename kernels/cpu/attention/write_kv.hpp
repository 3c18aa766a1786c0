// Writes keys and values of new tokens to their pages.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/batch.hpp"
#include "data/kv_type.hpp"
#include "simd/math.hpp"
#include "simd/simd.hpp"
#include "attention/fp8.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Writes a token's key or value for one head to slot `place` of a page; `head` is the start of the head in the page.
static inline void write_kv(const Batch& b, uint8_t* head, size_t place, const float* from, int n) {
  uint8_t* to = head + place * n * item_bytes(b.kv_type);
  if (!has_scales(b.kv_type)) {
    for (int d = 0; d < n; d += 16)
      b.kv_type == KvType::bf16 ? v_store_bf16((uint16_t*)to + d, v_load(from + d))
                                : v_store((float*)to + d, v_load(from + d));
    return;
  }
  float by;
  const float largest = b.kv_type == KvType::int8 ? kMaxCode : kMaxFp8;
  const float scale = quantization_scale(from, n, largest, by);
  const V inverse = v_set(by), limit = v_set(largest);
  for (int d = 0; d < n; d += 16) {
    // NaN is clamped to a number; the scale is NaN
    const V scaled = v_max(v_min(v_mul(v_load(from + d), inverse), limit), v_sub(v_zero(), limit));
    b.kv_type == KvType::int8 ? v_store_int8((int8_t*)to + d, v_round(scaled)) : store_fp8(to + d, scaled);
  }
  std::memcpy(head + size_t(b.block_tokens) * n + place * kScaleBytes, &scale, kScaleBytes);
}

}  // namespace kvferry::KVFERRY_LEVEL
