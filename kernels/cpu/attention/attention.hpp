// Causal attention over KV pages; the arithmetic does not depend on the number of rows.
//
// A row's keys are split into partitions of 256 tokens, counted from the start of its sequence. Each partition computes
// its maximum score, then the weights, their sum and the weighted values; partitions are merged in order (Milakov and
// Gimelshein, Online normalizer calculation for softmax, 2018). For decode rows with long contexts, partitions are
// distributed over threads and merged later, with the same operations as in sequential order, so the results are
// bit-identical. Attention weights beyond a row's position are exactly zero, so the values that a tile computes there
// have no effect.
//
// The transposed keys of 16 tokens form a panel, as in a weight matrix, and so do 16 elements of all values. The query
// heads that share a KV head are rows of the same tile, so each key and value is read once for all of them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/batch.hpp"
#include "data/kv_type.hpp"
#include "simd/amx.hpp"
#include "simd/math.hpp"
#include "simd/simd.hpp"
#include "products/amx_products.hpp"
#include "products/tiles.hpp"
#include "attention/item.hpp"
#include "attention/masks.hpp"
#include "attention/pages.hpp"
#include "attention/paths.hpp"
#include "attention/softmax.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Bytes per panel of keys.
template <KvType K>
static inline constexpr size_t key_panel_bytes(int head_dim) {
  return size_t(head_dim) * 16 * kPackedBytes<K>;
}

// Bytes per panel of values; the extra cache line avoids set conflicts between panels.
template <KvType K>
static inline constexpr size_t value_panel_bytes() {
  return size_t(kPartition) * 16 * kPackedBytes<K> + 64;
}

constexpr float kMaxInt16 = 32767.0f;
constexpr int kPaddingRows = 16;  // after the last row, because a tile may reach beyond it

// Scratch memory of a thread; `attention_bytes` computes its size.
struct AttentionScratch {
  uint8_t* keys;                     // [16 panels][head_dim][16] in the level's packing
  uint8_t* values;                   // [head_dim / 16 panels][256][16], `value_panel_bytes` apart
  float* queries;                    // [rows][head_dim] as floats, bfloat16 or int16
  float* query_scales;               // [rows], for int16 queries
  float* totals;                     // [rows][head_dim]
  float* max_score;                  // [rows]
  float* sums;                       // [rows]
  float *key_scales, *value_scales;  // [256], for int8 and fp8 KV; scales of keys include kKeyCodeScale
};
static inline size_t attention_bytes(int group, int head_dim) {
  const size_t rows = size_t(tile_queries(group)) * group + kPaddingRows;
  return size_t(kPartition) * head_dim * 4 + value_panel_bytes<KvType::f32>() * (head_dim / 16) +
         2 * rows * head_dim * 4 + 3 * rows * 4 + 2 * kPartition * 4 + 1024;
}
static inline AttentionScratch lay_out_scratch(uint8_t* at, int group, int head_dim) {
  const size_t rows = size_t(tile_queries(group)) * group + kPaddingRows;
  AttentionScratch s;
  s.keys = at;
  s.values = at + size_t(kPartition) * head_dim * 4;
  s.queries = (float*)(s.values + value_panel_bytes<KvType::f32>() * (head_dim / 16));
  s.totals = s.queries + rows * head_dim;
  s.max_score = s.totals + rows * head_dim;
  s.sums = s.max_score + rows;
  s.query_scales = s.sums + rows;
  s.key_scales = s.query_scales + rows;
  s.value_scales = s.key_scales + kPartition;
  return s;
}

// out [R][panels * 16] = x [R][depth] times packed panels. Strides of x and out are in elements, strides of panels in
// bytes.
template <KvType K, int R>
static inline void multiply(const void* x, int x_stride, const uint8_t* w, size_t w_stride, int panels, int depth,
                            float* out, int out_stride) {
  for (int p = 0; p < panels;) {
    const int columns = tile_columns(panels - p);
    with_columns(columns, [&](auto width) {
      constexpr int C = decltype(width)::value;
      if constexpr (packing_of(K) == Packing::words) {
        tile_int16<R, C>((const int16_t*)x, x_stride, w + p * w_stride, w_stride, depth / 2, out + p * 16, out_stride);
      } else if constexpr (packing_of(K) == Packing::pairs) {
#if KVFERRY_PAIRS
        tile_bf16<R, C>((const uint16_t*)x, x_stride, w + p * w_stride, w_stride, depth / 2, out + p * 16, out_stride);
#endif
      } else {
        tile_f32<R, C>((const float*)x, x_stride, (const float*)(w + p * w_stride), w_stride / 4, depth, out + p * 16,
                       out_stride);
      }
    });
    p += columns;
  }
}

#if KVFERRY_AMX
// Like `multiply`, but with AMX, for bf16 rows: 16 rows, or as many as the tiles are configured to hold.
static inline void multiply_amx(const uint16_t* x, int x_stride, const uint8_t* w, size_t w_stride, int panels,
                                int depth, float* out, int out_stride) {
  for (int p = 0, columns; p < panels; p += columns) {
    const auto run = [&](auto count) {
      constexpr int C = decltype(count)::value;
      amx_tile_bf16<1, C, false>(x, size_t(x_stride), w + size_t(p) * w_stride, w_stride, depth, out + p * 16,
                                 out_stride);
      columns = C;
    };
    const int left = panels - p;
    left >= 4 ? run(Count<4>{}) : left >= 2 ? run(Count<2>{}) : run(Count<1>{});
  }
}
#endif

// Whether attention uses AMX, which reads 32 values of a head at a time.
template <KvType K>
static inline bool uses_amx(int head_dim) {
  return KVFERRY_AMX && packing_of(K) == Packing::pairs && head_dim % 32 == 0;
}

// Converts a row's scores to softmax weights in place, for `panels` groups of 16 tokens; the row attends to the first
// `seen` tokens without the first `hidden`. If all are hidden, the weights have no meaning, and the maximum score is a
// mask's score, so that a later partition, which contains the row's own token, replaces them entirely. `step` is the
// scale of an int16 query. Returns the scale of the weights, which is 1 unless they are int16. int16 weights are
// multiplied by the value scales and then quantized with the largest product as maximum: with the largest value scale
// alone, a token with negligible weight would reduce the precision of all other tokens.
template <KvType K>
static inline float softmax_weights(const AttentionScratch& s, float* scores, uint16_t* narrow, int hidden, int seen,
                                    int panels, float scale, float soft_cap, float step, float& max_score, float& sum) {
  constexpr Packing packing = packing_of(K);
  constexpr bool is_coded = has_scales(K);
  const int full = seen / 16, used = (seen + 15) / 16;
  if constexpr (is_coded)
    for (int p = 0; p < used; ++p)
      v_store(scores + p * 16, v_mul(v_load(scores + p * 16), v_mul(v_load(s.key_scales + p * 16), v_set(step))));
  if (soft_cap > 0.0f)
    for (int p = 0; p < used; ++p)
      v_store(scores + p * 16,
              v_mul(v_soft_cap(v_mul(v_load(scores + p * 16), v_set(scale)), soft_cap), v_set(1.0f / scale)));
  const bool is_hidden = hidden > 0 && hidden >= seen;
  if (hidden > 0) hide_first(scores, hidden, is_hidden ? 0.0f : kMaskedScore);
  if (used > full)
    v_store(scores + full * 16, v_add(v_load(scores + full * 16), v_load(kTailMask + 16 - (seen - full * 16))));
  V top = v_load(scores);
  for (int p = 1; p < used; ++p) top = v_max(top, v_load(scores + p * 16));
  const float peak = v_reduce_max(top);
  max_score = is_hidden ? kMaskedScore : peak * scale;
  V all = v_zero();
  constexpr bool is_rough = KVFERRY_PAIRS && packing != Packing::floats;
  const float in_octaves = scale * kLog2E;
  const V by = v_set(is_rough ? in_octaves : scale), least = v_set(is_rough ? -peak * in_octaves : -peak * scale);
  const auto weight = [&](int at) {
    V x = v_fma(v_load(scores + at * 16), by, least);
    if constexpr (is_rough) {
#if KVFERRY_PAIRS
      x = v_exp2_approx(x);
#endif
    } else {
      x = v_exp(x);
    }
    all = v_add(all, x);
    return is_coded ? v_mul(x, v_load(s.value_scales + at * 16)) : x;
  };
  const auto store_weights = [&](int at, V x) {
    if constexpr (packing == Packing::pairs) {
      v_store_bf16(narrow + at * 16, x);
    } else {
      v_store(scores + at * 16, x);
    }
  };
  int p = 0;
#if KVFERRY_PAIRS
  if constexpr (packing == Packing::pairs)
    for (; p + 2 <= used; p += 2) {
      const V first = weight(p), second = weight(p + 1);
      p_store_bf16(narrow + p * 16, first, second);
    }
#endif
  for (; p < used; ++p) store_weights(p, weight(p));
  for (; p < panels; ++p) store_weights(p, v_zero());
  sum = v_reduce_add(all);
  if constexpr (packing != Packing::words) return 1.0f;
  float inverse;
  const float counts = quantization_scale(scores, panels * 16, kMaxInt16, inverse);
  for (p = 0; p < panels; ++p)
    v_store_int16((int16_t*)narrow + p * 16, v_round(v_mul(v_load(scores + p * 16), v_set(inverse))));
  return counts;
}

// Computes softmax weights and weighted values of R rows for a partition whose keys and values are packed, and merges
// them into `totals`. With AMX, `count` of the R rows are used.
template <KvType K, int R, int Widest, bool OnAmx = false>
static inline void attend_rows(const AttentionGeometry& g, const AttentionScratch& s, int row, int first_position,
                               int start, int count = R) {
  const int rows = OnAmx ? count : R;
  alignas(64) float scores[R * kPartition];
  alignas(64) uint16_t narrow[R * kPartition];
  alignas(64) float weighted[R * Widest];
  const int D = g.head_dim, N = g.value_dim;
  // Rows are ordered by query; the heads of a group are adjacent.
  const auto seen_by = [&](int r) {
    const int seen = first_position + (row + r) / g.group + 1 - start;
    return seen < 0 ? 0 : seen < kPartition ? seen : kPartition;
  };
  const auto hidden_from = [&](int r) {
    const int hidden = g.window ? first_position + (row + r) / g.group + 1 - g.window - start : 0;
    return hidden < 0 ? 0 : hidden < seen_by(r) ? hidden : seen_by(r);
  };
  const int max_seen = seen_by(rows - 1);
  if (max_seen == 0) return;
  const int panels = (max_seen + 15) / 16;
  const uint8_t* queries = (const uint8_t*)s.queries + size_t(row) * D * kPackedBytes<K>;
  if constexpr (OnAmx) {
#if KVFERRY_AMX
    multiply_amx((const uint16_t*)queries, D, s.keys, key_panel_bytes<K>(D), panels, D, scores, kPartition);
#endif
  } else {
    multiply<K, R>(queries, D, s.keys, key_panel_bytes<K>(D), panels, D, scores, kPartition);
  }
  const int weight_panels = OnAmx ? (panels + 1) / 2 * 2 : panels;
  Softmax before, here;
  float counts[R];
  for (int r = 0; r < rows; ++r) {
    before.max_score[r] = s.max_score[row + r];
    before.sums[r] = s.sums[row + r];
    counts[r] = softmax_weights<K>(s, scores + r * kPartition, narrow + r * kPartition, hidden_from(r), seen_by(r),
                                   weight_panels, g.scale, g.soft_cap, s.query_scales[row + r], here.max_score[r],
                                   here.sums[r]);
  }
  if constexpr (OnAmx) {
#if KVFERRY_AMX
    multiply_amx(narrow, kPartition, s.values, value_panel_bytes<K>(), N / 16, weight_panels * 16, weighted, Widest);
#endif
  } else {
    multiply<K, R>(packing_of(K) == Packing::floats ? (const void*)scores : narrow, kPartition, s.values,
                   value_panel_bytes<K>(), N / 16, panels * 16, weighted, Widest);
  }
  // The scale is applied before the merge, so that rounding does not depend on where the merge happens.
  if constexpr (packing_of(K) == Packing::words)
    for (int r = 0; r < rows; ++r)
      for (int d = 0; d < N; d += 16)
        v_store(weighted + r * Widest + d, v_mul(v_load(weighted + r * Widest + d), v_set(counts[r])));
  alignas(64) float keep[16], take[16];
  merge_sums(before, here, keep, take);
  for (int r = 0; r < rows; ++r) {
    if (seen_by(r) == 0) continue;
    merge_values(s.totals + size_t(row + r) * N, weighted + r * Widest, keep[r], take[r], N);
    s.max_score[row + r] = before.max_score[r];
    s.sums[row + r] = before.sums[r];
  }
}

// Stores a query in the packing of its keys; returns the scale of an int16 query, otherwise 1.
template <KvType K>
static inline float store_query(uint8_t* to, const float* from, int n) {
  constexpr Packing packing = packing_of(K);
  float inverse = 1.0f, step = 1.0f;
  if constexpr (packing == Packing::words) step = quantization_scale(from, n, kMaxInt16, inverse);
  for (int d = 0; d < n; d += 16) {
    const V v = v_load(from + d);
    if constexpr (packing == Packing::floats) v_store((float*)to + d, v);
    if constexpr (packing == Packing::pairs) v_store_bf16((uint16_t*)to + d, v);
    if constexpr (packing == Packing::words) v_store_int16_quads((int16_t*)to + d, v_round(v_mul(v, v_set(inverse))));
  }
  return step;
}

// Computes one KV head of an item. The rows' totals stay in the scratch memory, not yet divided by their sums.
// `sharers` lists the item's sequences and is null for a single sequence. `next` is the item that the thread probably
// runs next; its first keys are prefetched. `Widest`: maximum size of a value vector.
template <KvType K, int Widest>
static void attend(const Batch& batch, const AttentionGeometry& g, const AttentionItem& item, const int* sharers,
                   int kv_head, const AttentionItem* next, const float* queries, int query_stride,
                   const AttentionScratch& s) {
  const Sequence sequence = sequence_of(batch, g.place.group, item.sequence);
  const int D = g.head_dim, N = g.value_dim, rows = item.queries * g.group;
  const bool is_tree = sequence.tree_tokens > 0;
  // Sequences that share a partition attend to all its tokens, as if the queries directly followed the partition. All
  // rows of a tree attend to the tokens before it.
  const int start_of_tree = kvferry::first_position(sequence);
  const int first_position = sharers   ? item.end * kPartition
                             : is_tree ? start_of_tree
                                       : sequence.context - sequence.queries + item.first_query;
  for (int q = 0; q < item.queries; ++q)
    for (int h = 0; h < g.group; ++h) {
      const int at = sharers ? batch.sequences[sharers[q]].first : sequence.first + item.first_query + q;
      const float* from = queries + size_t(at) * query_stride + size_t(kv_head * g.group + h) * D;
      const int row = q * g.group + h;
      s.query_scales[row] = store_query<K>((uint8_t*)s.queries + size_t(row) * D * kPackedBytes<K>, from, D);
      for (int d = 0; d < N; d += 16) v_store(s.totals + size_t(row) * N + d, v_zero());
      s.max_score[row] = -__builtin_inff();
      s.sums[row] = 0.0f;
    }
  // Tokens that the last row attends to, or that precede a tree.
  const int last = sharers || is_tree ? first_position : first_position + item.queries;
  const int packed = last < item.end * kPartition ? last : item.end * kPartition, behind = (packed + 15) / 16 * 16;
  const int hidden = hidden_tokens(g.window, first_position);  // hidden from all rows; their pages may be released
  // Returns the key packed kPrefetchGroups groups after the key at t: of this head, of the next head or the next item.
  const auto prefetch_target = [&](int t) -> Key {
    const int then = t + 16 * kPrefetchGroups, further = then - behind;
    if (further < 0) return then < hidden ? Key{} : key_at<K>(batch, g, sequence, kv_head, then);
    const int own = first_read(item.begin, hidden) + further;
    if (kv_head + 1 < item.kv_end)
      return own < packed && own >= hidden ? key_at<K>(batch, g, sequence, kv_head + 1, own) : Key{};
    if (!next) return {};
    const Sequence other = sequence_of(batch, g.place.group, next->sequence);
    const int not_seen = hidden_tokens(g.window, other.context - other.queries + next->first_query);
    const int token = first_read(next->begin, not_seen) + further;
    return token < other.context && token >= not_seen ? key_at<K>(batch, g, other, next->kv_begin, token) : Key{};
  };
  TokenGroupCopy copy;
  // Packs a group of 16 tokens as panel `p` of its partition.
  const auto pack = [&](const TokenGroup& group, int p, Key ahead) {
    pack_tokens<K>(g, group, ahead.row, s.keys + p * key_panel_bytes<K>(D),
                   s.values + size_t(p) * 16 * 16 * kPackedBytes<K>, value_panel_bytes<K>());
    if constexpr (has_scales(K)) {
      if (ahead.scale) {
        prefetch_row(ahead.scale, 1);
        prefetch_row(ahead.scale + value_offset<K>(g), 1);
      }
      v_store(s.key_scales + p * 16, v_mul(v_load((const float*)group.key_scales), v_set(1.0f / kKeyCodeScale<K>)));
      v_store(s.value_scales + p * 16, v_load((const float*)group.value_scales));
    }
  };
  // Computes rows [begin, finish) for a partition whose tokens from `start` to `end` are packed. The first row of the
  // item would have position `first`.
  const auto attend_packed = [&](int begin, int finish, int first, int start, int end) {
#if KVFERRY_AMX
    if (uses_amx<K>(D)) {
      // AMX reads 32 tokens at a time, so zeros follow an odd last group.
      const int sixteens = (end - start + 15) / 16, count = finish - begin;
      for (int d = 0; sixteens % 2 && d < N / 16; ++d)
        std::memset(s.values + d * value_panel_bytes<K>() + size_t(sixteens) * 16 * 32, 0, 16 * 32);
      const AmxTiles tiles(count < kAmxRows ? count : kAmxRows, kAmxRowBytes);
      for (int row = begin; row < finish; row += kAmxRows)
        attend_rows<K, kAmxRows, Widest, true>(g, s, row, first, start,
                                               finish - row < kAmxRows ? finish - row : kAmxRows);
      return;
    }
#endif
    const int step = balanced_rows(finish - begin, kTileRows);
    for (int row = begin; row < finish; row += step) {
      const int count = finish - row < step ? finish - row : step;
      with_count<kTileRows>(
          count, [&](auto number) { attend_rows<K, decltype(number)::value, Widest>(g, s, row, first, start); });
    }
  };
  for (int part = item.begin; part < item.end; ++part) {
    const int start = part * kPartition, behind_it = start + kPartition;
    if (behind_it <= hidden) continue;
    const bool has_paths = is_tree && behind_it > start_of_tree;
    const int end = has_paths ? start_of_tree / 16 * 16 : last < behind_it ? last : behind_it;
    for (int t = start; t < end; t += 16) {
      const int p = (t - start) / 16;
      if (t + 16 <= hidden) {  // panels of zeros, since a weight of zero times anything finite is zero
        pack_zeros<K>(g, s.keys + p * key_panel_bytes<K>(D), s.values + size_t(p) * 16 * 16 * kPackedBytes<K>,
                      value_panel_bytes<K>());
        v_store(s.key_scales + p * 16, v_zero());
        v_store(s.value_scales + p * 16, v_zero());
        continue;
      }
      const TokenGroup group = token_group_at<K>(batch, g, sequence, kv_head, t, hidden, end, copy);
      pack(group, p, prefetch_target(t));
    }
    if (!has_paths && is_tree && g.window) {  // how much the window hides follows from the row's depth in the tree
      for (int q = 0; q < item.queries; ++q) {
        const int position = attended_tokens(batch, sequence, item.first_query + q) - 1;
        attend_packed(q * g.group, (q + 1) * g.group, position - q, start, end);
      }
      continue;
    }
    if (!has_paths) {
      attend_packed(0, rows, first_position, start, end);
      continue;
    }
    for (int q = 0; q < item.queries; ++q) {
      const Path path = path_of(batch, sequence, item.first_query + q);
      const int path_end = path.end < behind_it ? path.end : behind_it;
      for (int t = end > start ? end : start; t < path_end; t += 16)
        pack(path_group_at<K>(batch, g, sequence, path, kv_head, t, hidden, copy), (t - start) / 16, Key{});
      if (path_end > start) attend_packed(q * g.group, (q + 1) * g.group, path.end - 1 - q, start, path_end);
    }
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
