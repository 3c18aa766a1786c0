// Low-rank updates for rows with adapters: `shrink` computes A x of a few rows with one adapter, `expand` adds B (A x)
// to a tile of a product (Chen et al., Punica, 2024; Sheng et al., S-LoRA, 2024).
//
// Every value of A x is a chain of additions in the order of its inputs, and every update is a chain in the order of
// ranks, so a row's result does not depend on the rest of the batch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/adapter.hpp"
#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Rows and ranks of a tile, whose sums stay in registers.
#if KVFERRY_PAIRS
constexpr int kShrinkRows = 4, kShrinkRanks = 4;
#else
constexpr int kShrinkRows = 2, kShrinkRanks = 2;
#endif
constexpr int kExpandRows = 2;

// Two vectors of weights: floats consecutively, bfloat16 in pairs of lanes.
static inline void load_two(const float* p, V& first, V& second) {
  first = v_load(p);
  second = v_load(p + kPanel);
}
static inline void load_two(const uint16_t* p, V& first, V& second) { v_load_pairs(p, first, second); }
static inline V load_wide(const float* p) { return v_load(p); }
static inline V load_wide(const uint16_t* p) { return v_load_bf16(p); }

// out [R][K] = x [R] times K rows of A. Vectors of 16 partial sums are reduced at the end.
template <int R, int K, class X, class A>
[[gnu::always_inline]] static inline void shrink_tile(const X* const (&x)[R], const A* a, int width, int n,
                                                      float* const (&out)[R]) {
  V sum[R][K];
  clear(sum);
  const auto add = [&](const X* const(&at)[R], const A* weights) {
    V inputs[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      inputs[r][0] = load_wide(at[r]);
      inputs[r][1] = load_wide(at[r] + kPanel);
    }
#pragma GCC unroll 4
    for (int k = 0; k < K; ++k) {
      V w[2];
      prefetch(weights + size_t(K + k) * width);  // weights of the next ranks
      load_two(weights + size_t(k) * width, w[0], w[1]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r][k] = v_fma(inputs[r][1], w[1], v_fma(inputs[r][0], w[0], sum[r][k]));
    }
  };
  int i = 0;
  const X* at[R];
  for (; i + kGroup <= n; i += kGroup) {
    for (int r = 0; r < R; ++r) at[r] = x[r] + i;
    add(at, a + i);
  }
  if (i < n) {  // memory after the last input may contain values that are not finite
    alignas(64) X tails[R][kGroup] = {};
    for (int r = 0; r < R; ++r) {
      std::memcpy(tails[r], x[r] + i, size_t(n - i) * sizeof(X));
      at[r] = tails[r];
    }
    add(at, a + i);
  }
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) out[r][k] = v_reduce_add(sum[r][k]);
}

// shrunk [row][stride] = A x of `count` rows, whose inputs are in `x`. Ranks are multiples of kRankStep.
template <class X, class A>
static inline void shrink_rows(const LowRank& update, const X* x, size_t x_stride, int n, const int* rows, int count,
                               float* shrunk, size_t stride) {
  static_assert(kRankStep % kShrinkRanks == 0);
  for (int first = 0; first < count; first += kShrinkRows) {
    const int* own = rows + first;
    with_count<kShrinkRows>(count - first < kShrinkRows ? count - first : kShrinkRows, [&](auto number) {
      constexpr int R = decltype(number)::value;
      const X* from[R];
      for (int r = 0; r < R; ++r) from[r] = x + size_t(own[r]) * x_stride;
      for (int k = 0; k < update.rank; k += kShrinkRanks) {
        float* to[R];
        for (int r = 0; r < R; ++r) to[r] = shrunk + size_t(own[r]) * stride + k;
        shrink_tile<R, kShrinkRanks>(from, (const A*)update.a + size_t(k) * update.width, update.width, n, to);
      }
    });
  }
}

// `n`: inputs of a row; floats are read unless only bfloat16 inputs are stored.
static inline void shrink(const LowRank& update, bool is_bf16, const Rows& x, bool has_floats, int n, const int* rows,
                          int count, float* shrunk, size_t stride) {
  const size_t x_stride = size_t(x.stride);
  if (has_floats) {
    is_bf16 ? shrink_rows<float, uint16_t>(update, x.f32, x_stride, n, rows, count, shrunk, stride)
            : shrink_rows<float, float>(update, x.f32, x_stride, n, rows, count, shrunk, stride);
  } else {
    is_bf16 ? shrink_rows<uint16_t, uint16_t>(update, x.bf16, x_stride, n, rows, count, shrunk, stride)
            : shrink_rows<uint16_t, float>(update, x.bf16, x_stride, n, rows, count, shrunk, stride);
  }
}

// The updates that a product adds to its results: for one packed matrix and all adapters of a batch.
struct Expansion {
  const int64_t* adapter_of_row;  // [rows]: index of the row's adapter, -1 for none
  const Adapter* const* adapters;
  int layer;
  LowRank AdapterLayer::* matrix;
  PanelParts parts;
  const float* shrunk;  // [rows][stride]: A x
  size_t stride;
};

// Adds B (A x) of R rows with one adapter to one panel, in the order of ranks.
template <int R, class B>
static inline void expand_panel(float* const (&to)[R], const B* b, const float* const (&shrunk)[R], int rank) {
  V sum[R];
  for (int r = 0; r < R; ++r) sum[r] = v_load(to[r]);
  for (int k = 0; k < rank; k += 2) {
    V first, second;
    load_two(b + size_t(k) * kPanel, first, second);
    for (int r = 0; r < R; ++r)
      sum[r] = v_fma(v_set(shrunk[r][k + 1]), second, v_fma(v_set(shrunk[r][k]), first, sum[r]));
  }
  for (int r = 0; r < R; ++r) v_store(to[r], sum[r]);
}

template <int R>
static inline void expand_rows(const Expansion& e, const Adapter& adapter, const Tile& tile, int row) {
  const LowRank& update = adapter.layers[e.layer].*e.matrix;
  for (int c = 0; c < tile.columns; ++c) {
    int part, local;
    e.parts.locate(tile.panel + c, part, local);
    const LowRankPart& p = update.parts[part];
    if (!p.rank) continue;
    float* to[R];
    const float* shrunk[R];
    for (int r = 0; r < R; ++r) {
      to[r] = tile.values + ((row + r) * tile.columns + c) * kPanel;
      shrunk[r] = e.shrunk + size_t(tile.row + row + r) * e.stride + p.first;
    }
    const size_t at = size_t(local) * p.rank * kPanel, item = adapter.is_bf16 ? 2 : 4;
    // Prefetches the next panel: the streams of all adapters are too many for a core's hardware prefetchers.
    for (size_t line = 0; line < size_t(p.rank) * kPanel * item; line += 64)
      prefetch(p.b + (at + size_t(p.rank) * kPanel) * item + line);
    adapter.is_bf16 ? expand_panel(to, (const uint16_t*)p.b + at, shrunk, p.rank)
                    : expand_panel(to, (const float*)p.b + at, shrunk, p.rank);
  }
}

// Adds LoRA updates to a tile. Not inlined, since products without adapters would spill registers.
[[gnu::noinline]] static void expand(const Expansion& e, const Tile& tile) {
  const int64_t* adapters = e.adapter_of_row + tile.row;
  for (int r = 0, count; r < tile.rows; r += count) {
    count = 1;
    if (adapters[r] < 0) continue;
    while (count < kExpandRows && r + count < tile.rows && adapters[r + count] == adapters[r]) ++count;
    with_count<kExpandRows>(
        count, [&](auto number) { expand_rows<decltype(number)::value>(e, *e.adapters[adapters[r]], tile, r); });
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
