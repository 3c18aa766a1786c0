// Packing of keys and values from KV pages into panels, 16 tokens at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/batch.hpp"
#include "data/kv_type.hpp"
#include "simd/simd.hpp"
#include "attention/fp8.hpp"
#include "attention/item.hpp"

namespace kvferry::KVFERRY_LEVEL {

// One layer of the KV pages, with the layout of pages and heads.
struct AttentionGeometry {
  Place place;
  int first_kv_head, page_kv_heads;   // the model's first KV head in a page, and the KV heads of a page
  int group, head_dim, block_tokens;  // group: query heads per KV head
  int planes;                         // 2 for keys and values; 1 for latent vectors, whose first elements are the value
  int value_dim;                      // head_dim with 2 planes
  float scale;
  int window;      // number of tokens that a row attends to, including its own; 0 for all
  float soft_cap;  // 0 for none
};

template <KvType K>
static inline size_t row_bytes(const AttentionGeometry& g) {
  return size_t(g.head_dim) * item_bytes(K);
}

// Addresses of a token's key and, for int8 and fp8, of its scale. The value and its scale follow `value_offset` bytes
// later.
struct Key {
  const uint8_t *row, *scale;
};
template <KvType K>
static inline Key key_at(const Batch& batch, const AttentionGeometry& g, const Sequence& s, int kv_head, int token) {
  const size_t page = size_t(s.pages[token / g.block_tokens]), place = size_t(token % g.block_tokens),
               row = row_bytes<K>(g);
  const size_t in_page = size_t(g.place.layer) * g.planes * g.page_kv_heads + g.first_kv_head + kv_head;
  const uint8_t* head = batch.pages + (page * g.place.page_layers * g.planes * g.page_kv_heads + in_page) *
                                          head_bytes(K, g.block_tokens, g.head_dim);
  return {head + place * row, head + size_t(g.block_tokens) * row + place * kScaleBytes};
}
template <KvType K>
static inline size_t value_offset(const AttentionGeometry& g) {
  return size_t(g.planes - 1) * g.page_kv_heads * head_bytes(K, g.block_tokens, g.head_dim);
}

// Keys and values of 16 tokens that are contiguous in memory; scales are set only for int8 and fp8.
struct TokenGroup {
  const uint8_t *keys, *values, *key_scales, *value_scales;
};
// Copies of the keys and values of tokens that are not contiguous.
struct TokenGroupCopy {
  alignas(64) uint8_t rows[2][size_t(16) * kMaxKeyDim * 4];
  alignas(64) uint8_t scales[2][16 * kScaleBytes];
};

static inline void copy_or_clear(uint8_t* to, const uint8_t* from, size_t bytes) {
  from ? std::memcpy(to, from, bytes) : std::memset(to, 0, bytes);
}

// Tokens [first, first + 16), not all of which are hidden: in place if one page holds them, otherwise copied to `copy`.
// In the copy, the first `hidden` tokens of the sequence, whose pages may be released, and the tokens from `end` on are
// zeros.
template <KvType K>
static inline TokenGroup token_group_at(const Batch& batch, const AttentionGeometry& g, const Sequence& s, int kv_head,
                                        int first, int hidden, int end, TokenGroupCopy& copy) {
  const size_t values = value_offset<K>(g), row = row_bytes<K>(g);
  if (first + 16 <= end && first % g.block_tokens + 16 <= g.block_tokens) {
    const Key key = key_at<K>(batch, g, s, kv_head, first);
    return {key.row, key.row + values, key.scale, key.scale + values};
  }
  for (int t = 0; t < 16; ++t) {
    const bool is_there = first + t < end && first + t >= hidden;
    const Key key = is_there ? key_at<K>(batch, g, s, kv_head, first + t) : Key{};
    for (size_t half = 0; half < 2; ++half) {
      copy_or_clear(copy.rows[half] + t * row, is_there ? key.row + half * values : nullptr, row);
      if constexpr (has_scales(K))
        copy_or_clear(copy.scales[half] + t * kScaleBytes, is_there ? key.scale + half * values : nullptr, kScaleBytes);
    }
  }
  return {copy.rows[0], copy.rows[1], copy.scales[0], copy.scales[1]};
}

constexpr int kPrefetchGroups = 4;  // groups of 16 tokens between a prefetch and its use

// Prefetches a row. Pages are scattered, so the hardware prefetcher cannot predict them. One row is prefetched per
// packed row, because bursts of prefetches are dropped; the target is L2, which tracks twice as many outstanding misses
// as L1. If pages have fewer than 16 tokens, some of the prefetched lines belong to other pages and are not used.
[[gnu::always_inline]] static inline void prefetch_row(const uint8_t* row, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

#if KVFERRY_PAIRS
// Transposes 16 rows of 16 32-bit lanes: out[i] is lane i of all rows.
[[gnu::always_inline]] static inline void transpose_lanes(__m512i r[16], __m512i out[16]) {
  __m512i* t = out;
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) out[i] = r[i];
}

// Transposes [16 tokens][32 values], with tokens `row` bytes apart, to [16 pairs][16 tokens][2].
static inline void transpose_pairs(const uint8_t* from, size_t row, const uint8_t* ahead, uint8_t* out) {
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    r[i] = _mm512_loadu_si512(from + i * row);
    prefetch_row(ahead + i * row, 64);
  }
  transpose_lanes(r, t);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + size_t(i) * 64, t[i]);
}

// Transposes int8 values, up to 64 per token, to vectors of four values per token; `each(i, v)` receives values 4 i to
// 4 i + 3.
template <class Each>
[[gnu::always_inline]] static inline void transpose_codes(const uint8_t* from, size_t row, const uint8_t* ahead,
                                                          int count, Each&& each) {
  __m512i r[16], t[16];
  const __mmask64 there = ~uint64_t(0) >> (64 - count);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    r[i] = _mm512_maskz_loadu_epi8(there, from + i * row);
    prefetch_row(ahead + i * row, size_t(count));
  }
  transpose_lanes(r, t);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) {
    if (i * 4 >= count) break;
    each(i, t[i]);
  }
}
#endif

// Element type in which keys and values are multiplied: floats, bf16 pairs or int16 pairs.
enum class Packing { floats, pairs, words };
constexpr Packing packing_of(KvType type) {
  if (type == KvType::int8) return KVFERRY_AMX ? Packing::pairs : Packing::words;
  return type != KvType::f32 && KVFERRY_PAIRS ? Packing::pairs : Packing::floats;  // fp8 is widened to bf16
}
template <KvType K>
constexpr size_t kPackedBytes = packing_of(K) == Packing::floats ? 4 : 2;  // per value

// Factor of int8 keys in bf16 products: an int8 value is moved to the top byte of an int32, which is 2^24 times the
// value and exact as a float.
template <KvType K>
constexpr float kKeyCodeScale = K == KvType::int8 && packing_of(K) == Packing::pairs ? 0x1p24f : 1.0f;

// Loads 16 values of a token as floats.
template <KvType K>
static inline V values_at(const uint8_t* token, int d) {
  return K == KvType::bf16 ? v_load_bf16((const uint16_t*)token + d) : v_load((const float*)token + d);
}

// Packs 16 keys into a panel and prefetches 16 keys at `ahead`. In each group of four, int16 pairs are in the order 0 2
// 1 3.
template <KvType K>
static inline void pack_keys(const AttentionGeometry& g, const uint8_t* keys, const uint8_t* ahead, uint8_t* out) {
  const size_t row = row_bytes<K>(g);
#if KVFERRY_PAIRS
  if constexpr (K == KvType::int8) {
    for (int d = 0; d < g.head_dim; d += 64)
      transpose_codes(keys + d, row, ahead + d, g.head_dim - d < 64 ? g.head_dim - d : 64, [&](int i, __m512i codes) {
        P first, second;
        packing_of(K) == Packing::pairs ? p_from_codes(codes, first, second) : w_from_codes(codes, first, second);
        p_store(out + size_t(d + 4 * i) * 32, first);
        p_store(out + size_t(d + 4 * i) * 32 + 64, second);
      });
    return;
  } else if constexpr (K == KvType::bf16) {
    int d = 0;
    for (; d + 32 <= g.head_dim; d += 32) transpose_pairs(keys + d * 2, row, ahead + d * 2, out + size_t(d) * 32);
    for (int t = 0; d < g.head_dim && t < 16; ++t) prefetch_row(ahead + t * row + d * 2, 64);
    for (; d < g.head_dim; d += 2)
      for (int t = 0; t < 16; ++t) std::memcpy(out + size_t(d) * 32 + t * 4, keys + t * row + d * 2, 4);
    return;
  }
#endif
  for (int d = 0; d < g.head_dim; d += 16) {
    const int begin = d * 16 / g.head_dim, end = (d + 16) * 16 / g.head_dim;
    for (int t = begin; t < end; ++t) prefetch_row(ahead + t * row, row);
    const uint8_t* from = keys + row / g.head_dim * d;
    uint8_t* to = out + size_t(d) * 16 * kPackedBytes<K>;
#if !KVFERRY_PAIRS
    if constexpr (K == KvType::int8) {
      w_transpose(from, row, (int16_t*)to);
      continue;
    }
#endif
    if constexpr (packing_of(K) == Packing::floats) v_transpose<K>(from, row, (float*)to);
  }
}

// Packs the values of 16 tokens into panels of 16 values each, `stride` bytes apart.
template <KvType K>
static inline void pack_values(const AttentionGeometry& g, const uint8_t* values, const uint8_t* ahead, uint8_t* out,
                               size_t stride) {
  const size_t row = row_bytes<K>(g);
  constexpr bool is_wide = packing_of(K) == Packing::floats;
  for (int t = 0; t < 16; t += is_wide ? 1 : 2) {
    const uint8_t *a = values + t * row, *b = a + row;
    uint8_t* to = out + size_t(t) * 16 * kPackedBytes<K>;
    prefetch_row(ahead + t * row, is_wide ? row : 2 * row);
    int d = 0;
    if constexpr (is_wide) {
      for (; d < g.value_dim; d += 16) v_store((float*)(to + size_t(d / 16) * stride), values_at<K>(a, d));
    } else if constexpr (packing_of(K) == Packing::words) {
      for (; d < g.value_dim; d += 16) w_interleave(a + d, b + d, (int16_t*)(to + size_t(d / 16) * stride));
    } else {
#if KVFERRY_PAIRS
      if constexpr (K == KvType::int8) {
        for (; d < g.value_dim; d += 16)
          p_store(to + size_t(d / 16) * stride, p_from_int32(load_int8_as_int32(a + d), load_int8_as_int32(b + d)));
        continue;
      }
      for (; d + 32 <= g.value_dim; d += 32) {
        P first, second;
        p_interleave(p_load(a + d * 2), p_load(b + d * 2), first, second);
        p_store(to + size_t(d / 16) * stride, first);
        p_store(to + size_t(d / 16 + 1) * stride, second);
      }
      if (d < g.value_dim)
        p_store(to + size_t(d / 16) * stride, p_interleave_half((const uint16_t*)a + d, (const uint16_t*)b + d));
#endif
    }
  }
}

// Packs the keys and values of 16 tokens, and prefetches those of 16 tokens at `ahead`, if any.
template <KvType K>
[[gnu::always_inline]] static inline void pack_tokens(const AttentionGeometry& g, const TokenGroup& group,
                                                      const uint8_t* ahead, uint8_t* keys, uint8_t* values,
                                                      size_t stride) {
  if constexpr (K == KvType::fp8) {
    alignas(64) uint16_t wide[2][size_t(16) * kMaxHeadDim];
    const int row = g.head_dim;
    for (int t = 0; t < 16; ++t) {
      if (ahead) {
        prefetch_row(ahead + t * row, size_t(row));
        prefetch_row(ahead + value_offset<K>(g) + t * row, size_t(row));
      }
      widen_fp8(group.keys + t * row, wide[0] + t * row, row);
      widen_fp8(group.values + t * row, wide[1] + t * row, row);
    }
    const uint8_t *wide_keys = (const uint8_t*)wide[0], *wide_values = (const uint8_t*)wide[1];
    pack_keys<KvType::bf16>(g, wide_keys, wide_keys, keys);
    pack_values<KvType::bf16>(g, wide_values, wide_values, values, stride);
  } else {
    pack_keys<K>(g, group.keys, ahead ? ahead : group.keys, keys);
    pack_values<K>(g, group.values, ahead ? ahead + value_offset<K>(g) : group.values, values, stride);
  }
}

// Packs 16 zero keys and values, for tokens that no row attends to.
template <KvType K>
static inline void pack_zeros(const AttentionGeometry& g, uint8_t* keys, uint8_t* values, size_t stride) {
  std::memset(keys, 0, size_t(g.head_dim) * 16 * kPackedBytes<K>);
  for (int d = 0; d < g.value_dim / 16; ++d) std::memset(values + size_t(d) * stride, 0, 16 * 16 * kPackedBytes<K>);
}

// First token that partitions from `begin` on read, if the first `hidden` tokens of a sequence are not read.
static inline int first_read(int begin, int hidden) {
  return begin * kPartition > hidden ? begin * kPartition : hidden / 16 * 16;
}

}  // namespace kvferry::KVFERRY_LEVEL
