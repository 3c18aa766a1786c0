// Register tiles: R rows times C panels of 16 outputs. With any number of rows, each output is a chain of additions in
// the order of its inputs, so a row's result does not depend on the rest of the batch.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/matrix.hpp"
#include "simd/simd.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Part of a product's result: some rows times some panels, row-major.
struct Tile {
  int row = 0, rows = 0, panel = 0, columns = 0;
  float* values = nullptr;  // [rows][columns * 16]

  V at(int r, int c) const { return v_load(values + (r * columns + c) * kPanel); }
};

// A reference to what receives the tiles of a product; it must outlive the call. One indirect call per tile, whose
// values are in memory, is not measurable, and a product is compiled once per level instead of once per receiver.
class Epilogue {
 public:
  template <class F>
  explicit Epilogue(const F& receive)
      : receiver_(&receive), call_([](const void* to, const Tile& tile) { (*static_cast<const F*>(to))(tile); }) {}
  void operator()(const Tile& tile) const { call_(receiver_, tile); }

 private:
  const void* receiver_;
  void (*call_)(const void*, const Tile&);
};

// Adjacent inputs of a row as 32 bits: two inputs of 16 bits or four inputs of 8 bits.
static inline uint32_t inputs_at(const void* p) {
  uint32_t inputs;
  std::memcpy(&inputs, p, 4);
  return inputs;
}

// Calls f(Count<n>) for n in 1 .. Most, which turns a run-time count into a template argument.
template <int N>
struct Count {
  static constexpr int value = N;
};
template <int Most, class F>
static inline void with_count(int n, F&& f) {
  if constexpr (Most > 1) {
    if (n < Most) {
      with_count<Most - 1>(n, f);
      return;
    }
  }
  f(Count<Most>{});
}

#if KVFERRY_PAIRS
static inline bool takes_pairs(Format format) { return format != Format::f32 && format != Format::f16; }
constexpr int kTileRows = 6, kTileColumns = 4, kFusedRows = 4;
#else
static inline bool takes_pairs(Format) { return false; }
constexpr int kTileRows = 6, kTileColumns = 1, kFusedRows = 6;
#endif
constexpr int kChunkPanels = 4;       // maximum panels per call of `product`
constexpr int kPrefetchBytes = 2048;  // software prefetch distance of a weight stream

// Rows per tile, at most `max_rows`, balanced over tiles: 8 rows are faster as 4 + 4 than as 6 + 2.
static inline int balanced_rows(int rows, int max_rows) {
  const int tiles = (rows + max_rows - 1) / max_rows;
  return (rows + tiles - 1) / tiles;
}

// Number of columns of a tile when `panels` panels remain: 4, 2 or 1.
static inline int tile_columns(int panels) {
  return panels >= kTileColumns ? kTileColumns : kTileColumns > 2 && panels >= 2 ? 2 : 1;
}
template <class F>
static inline void with_columns(int columns, F&& f) {
  if constexpr (kTileColumns > 2) {
    if (columns == 2) {
      f(Count<2>{});
      return;
    }
  }
  if (kTileColumns > 1 && columns == kTileColumns) {
    f(Count<kTileColumns>{});
  } else {
    f(Count<1>{});
  }
}

// Always inlined: GCC treats a function that only prefetches as free of side effects and drops its calls.
[[gnu::always_inline]] static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// Prefetches a cache line to which a later tile writes or accumulates.
template <class T>
[[gnu::always_inline]] static inline void prefetch_for_write(const T* p, size_t stride) {
  __builtin_prefetch(p + (KVFERRY_AMX ? 32 : kTileRows) * stride, 1, 3);
}

template <int R, int C>
[[gnu::always_inline]] static inline void clear(V (&sum)[R][C]) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = v_zero();
}

template <int R, int C>
[[gnu::always_inline]] static inline void store(const V (&sum)[R][C], float* out, int stride = C * kPanel) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v_store(out + r * stride + c * kPanel, sum[r][c]);
}

// sum += one input of each row times that input's weights in C panels.
template <int R, int C>
[[gnu::always_inline]] static inline void add_input(V (&sum)[R][C], const float* x, size_t stride,
                                                    const V (&panel)[C]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const V a = v_set(x[r * stride]);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = v_fma(a, panel[c], sum[r][c]);
  }
}

// out [R][C * 16] = x [R] times C float panels [k][16].
template <int R, int C>
static inline void tile_f32(const float* x, size_t x_stride, const float* w, size_t w_stride, int k, float* out,
                            int out_stride = C * kPanel) {
  V sum[R][C];
  clear(sum);
  for (int i = 0; i < k; ++i) {
    V panel[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) panel[c] = v_load(w + c * w_stride + size_t(i) * kPanel);
    add_input(sum, x + i, x_stride, panel);
  }
  store(sum, out, out_stride);
}

// Like the overload for floats, but for int16 pairs: panels [k2][16][2].
template <int R, int C>
static inline void tile_int16(const int16_t* x, size_t x_stride, const uint8_t* w, size_t w_stride, int k2, float* out,
                              int out_stride) {
  I sum[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = i_zero();
  for (int i = 0; i < k2; ++i) {
    W panel[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) panel[c] = w_load((const int16_t*)(w + c * w_stride + size_t(i) * 64));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const uint32_t pair = inputs_at(x + r * x_stride + 2 * i);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = i_add(sum[r][c], panel[c], pair);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) v_store(out + r * out_stride + c * kPanel, i_float(sum[r][c]));
}

#if KVFERRY_PAIRS
template <int R, int C>
[[gnu::always_inline]] static inline void add_pair(V (&sum)[R][C], const uint16_t* x, size_t stride,
                                                   const P (&panel)[C]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const P a = p_set(inputs_at(x + r * stride));
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) sum[r][c] = p_dot(sum[r][c], a, panel[c]);
  }
}

// Like the overload for floats, but for bf16 pairs: panels [k2][16][2].
template <int R, int C>
static inline void tile_bf16(const uint16_t* x, size_t x_stride, const uint8_t* w, size_t w_stride, int k2, float* out,
                             int out_stride = C * kPanel) {
  V sum[R][C];
  clear(sum);
  for (int i = 0; i < k2; ++i) {
    P panel[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      panel[c] = p_load(w + c * w_stride + size_t(i) * 64);
      if constexpr (R <= kFusedRows) prefetch(w + c * w_stride + size_t(i) * 64 + kPrefetchBytes);
    }
    add_pair(sum, x + 2 * i, x_stride, panel);
  }
  store(sum, out, out_stride);
}
#endif

}  // namespace kvferry::KVFERRY_LEVEL
