// Matrix products on AMX tiles: 16 rows of inputs times panels of 16 outputs.
//
// A packed panel has the layout of a tile of weights: 16 outputs side by side, with bf16 pairs or int8 quads of inputs
// (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and TDPBSSD). A row's result
// depends only on that row and accumulates 32 inputs at a time, so it is the same in any tile. AMX flushes denormals to
// zero and rounds to nearest even, regardless of MXCSR.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/amx.hpp"
#include "simd/simd.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

#if KVFERRY_AMX
// First row of the tile of `tall` rows that covers `row`, moved back so that the tile ends within `rows`. Results of
// rows that an earlier tile has computed are discarded.
static inline int tile_begin(int row, int rows, int tall) {
  return row + tall <= rows ? row : rows > tall ? rows - tall : 0;
}

// One step of the inner loop: loads an input tile and a weight tile when they are first used, then multiplies and
// accumulates.
template <int A, int C, int Row, int Column, bool Streams>
[[gnu::always_inline]] static inline void amx_step(const uint16_t* x, size_t x_bytes, const uint8_t* w) {
  if constexpr (Column == 0) amx_load_stream<4 + Row>(x, x_bytes);
  if constexpr (Row == 0) {
    amx_load<6 + Column % 2>(w, kAmxRowBytes);
    if constexpr (Streams)
      for (int line = 0; line < 16; ++line) prefetch(w + line * 64 + kPrefetchBytes);
  }
  amx_dot_bf16<Row * C + Column, 4 + Row, 6 + Column % 2>();
}

// out [16 A][16 C] with row stride `out_stride` = 16 A rows of x times C bf16 panels, `depth` inputs each. If
// `Streams`, the panels are read from memory (few rows), so they are prefetched kPrefetchBytes ahead. Otherwise,
// `lines` cache lines starting at `ahead` are prefetched per 32 inputs.
template <int A, int C, bool Streams>
static inline void amx_tile_bf16(const uint16_t* x, size_t x_stride, const uint8_t* w, size_t w_stride, int depth,
                                 float* out, int out_stride, const uint8_t* ahead = nullptr, int lines = 0) {
  static_assert(A * C <= 4 && (A == 1 || C <= 2));
  amx_zero<0>();
  if constexpr (A * C > 1) amx_zero<1>();
  if constexpr (A * C > 2) amx_zero<2>(), amx_zero<3>();
  const size_t x_bytes = x_stride * 2;
  const uint16_t* below = x + kAmxRows * x_stride;
  for (int i = 0; i < depth; i += 32, w += 1024) {
    if constexpr (!Streams)
      for (int line = 0; line < lines; ++line, ahead += 64) __builtin_prefetch(ahead, 0, 2);
    amx_step<A, C, 0, 0, Streams>(x + i, x_bytes, w);
    if constexpr (C > 1) amx_step<A, C, 0, 1, Streams>(x + i, x_bytes, w + w_stride);
    if constexpr (C > 2) amx_step<A, C, 0, 2, Streams>(x + i, x_bytes, w + 2 * w_stride);
    if constexpr (C > 2) amx_step<A, C, 0, 3, Streams>(x + i, x_bytes, w + 3 * w_stride);
    if constexpr (A > 1) amx_step<A, C, 1, 0, Streams>(below + i, x_bytes, w);
    if constexpr (A > 1 && C > 1) amx_step<A, C, 1, 1, Streams>(below + i, x_bytes, w + w_stride);
  }
  const size_t out_bytes = size_t(out_stride) * 4;
  amx_store<0>(out, out_bytes);
  if constexpr (C > 1) amx_store<1>(out + kPanel, out_bytes);
  if constexpr (C > 2) amx_store<2>(out + 2 * kPanel, out_bytes), amx_store<3>(out + 3 * kPanel, out_bytes);
  if constexpr (A > 1) amx_store<C>(out + size_t(kAmxRows) * out_stride, out_bytes);
  if constexpr (A > 1 && C > 1) amx_store<C + 1>(out + size_t(kAmxRows) * out_stride + kPanel, out_bytes);
}

// Computes a product with a bf16 matrix; see `product` for `epilogue`.
static inline void amx_product_bf16(const Matrix& m, const Rows& x, int rows, int panel, int panels,
                                    const Epilogue& epilogue) {
  alignas(64) float outs[2][4 * kAmxRows * kPanel];
  const int tall = rows < kAmxRows ? rows : kAmxRows;
  const AmxTiles tiles(tall, kAmxRowBytes);
  Tile last;  // stored after the next tile is issued, since an immediate load would stall on the tile store
  int turn = 0;
  for (int p = 0, columns; p < panels; p += columns) {
    const uint8_t* w = m.data + size_t(panel + p) * m.panel_bytes;
    columns = rows <= kAmxRows && panels - p >= 4 ? 4 : panels - p >= 2 ? 2 : 1;
    for (int row = 0, done; row < rows; row += done) {
      const bool two = rows >= 2 * kAmxRows && rows - row > kAmxRows && columns < 4;
      const int begin = tile_begin(row, rows, two ? 2 * kAmxRows : tall);
      const uint16_t* inputs = x.bf16 + size_t(begin) * x.stride;
      float* out = outs[turn ^= 1];
      // Prefetch the next panels while the rows are multiplied by the current panels.
      const int lines = (columns * 16 * 2 * kAmxRows + rows - 1) / rows;
      const uint8_t* ahead = w + columns * m.panel_bytes + size_t(row) / (2 * kAmxRows) * lines * (m.depth * 2);
      const auto run = [&](auto a, auto c) {
        amx_tile_bf16<decltype(a)::value, decltype(c)::value, false>(inputs, size_t(x.stride), w, m.panel_bytes,
                                                                     m.depth, out, columns * kPanel, ahead, lines);
      };
      if (rows <= kAmxRows) {
        const auto stream = [&](auto c) {
          amx_tile_bf16<1, decltype(c)::value, true>(inputs, size_t(x.stride), w, m.panel_bytes, m.depth, out,
                                                     columns * kPanel);
        };
        columns == 4 ? stream(Count<4>{}) : columns == 2 ? stream(Count<2>{}) : stream(Count<1>{});
      } else if (columns == 2) {
        two ? run(Count<2>{}, Count<2>{}) : run(Count<1>{}, Count<2>{});
      } else {
        two ? run(Count<2>{}, Count<1>{}) : run(Count<1>{}, Count<1>{});
      }
      if (last.rows) epilogue(last);
      done = begin + (two ? 2 * kAmxRows : tall) - row;
      last = {row, done, panel + p, columns, out + size_t(row - begin) * columns * kPanel};
    }
  }
  epilogue(last);
}

// Computes a product with a quantized matrix, with inputs in bf16 or int8; see `product` for `epilogue`. Instances for
// both are in a translation unit of their own (amx_codes.hpp).
template <bool Bytes>
void amx_product_codes(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch,
                       const Epilogue& epilogue);
#endif

}  // namespace kvferry::KVFERRY_LEVEL
