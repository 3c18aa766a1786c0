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
#include "products/codes.hpp"
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
template <class Epilogue>
static void amx_product_bf16(const Matrix& m, const Rows& x, int rows, int panel, int panels, Epilogue&& epilogue) {
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

// Unpacks a block of quantized weights into a weight tile: bf16 integers (4-bit values keep kCodeBias, which the
// minimum compensates) or int8 quads. Tables: the values of indices in table4, as bf16 and as bytes.
template <class Form, bool Bytes>
[[gnu::always_inline]] static inline void unpack_block(const uint8_t* at, uint8_t* to, const PairTable& table,
                                                       B byte_table) {
  constexpr bool is_table = Form::format == Format::table4;
  prefetch(at + Form::block / Form::inputs * Form::group + kPrefetchBytes);  // scales
#pragma GCC unroll 8
  for (int g = 0; g < Form::block / Form::inputs; ++g, at += Form::group) {
    prefetch_group<Form>(at);
    if constexpr (Bytes) {
      B quads[Form::inputs / 4];
      if constexpr (has_nibbles(Form::format)) b_codes4(at, quads[0], quads[1]);
      if constexpr (is_table) quads[0] = b_look_up(byte_table, quads[0]), quads[1] = b_look_up(byte_table, quads[1]);
      if constexpr (Form::format == Format::codes6) quads6(at, 0, quads);
      if constexpr (Form::format == Format::codes8) quads[0] = {quads8(at)};
#pragma GCC unroll 4
      for (int q = 0; q < Form::inputs / 4; ++q, to += 64) b_store(to, quads[q]);
    } else {
      PairGroup<Form> group;
      group.load(at);
#pragma GCC unroll 8
      for (int i = 0; i < Form::inputs / 2; ++i, to += 64)
        p_store(to, Form::format == Format::codes4 ? p_biased4(group.words[0], i) : group.pair(table, i));
    }
  }
}

// out [R][16] with row stride `out_stride` = R rows of x times a quantized panel: the sum in codes.hpp, or, if `Bytes`,
// in bytes.hpp. Every block's accumulator is stored, since the block's scales are applied in vector registers. The loop
// is software-pipelined: block b is multiplied, block b - 2 is stored and block b - 4 is loaded and scaled, so that no
// load waits for the matrix unit. `unpacked` contains the panel as weight tiles; the first row tile fills it for all
// row tiles.
template <class Form, bool Bytes, int R>
[[gnu::noinline]] static void amx_tile_codes(const Matrix& m, int panel, const Rows& x, uint8_t* unpacked,
                                             bool is_first, float* out, int out_stride) {
  constexpr int block = Form::block, kStore = 2, kLag = 4, kRing = 4;
  constexpr size_t input_bytes = Bytes ? 1 : 2, step = block * 16 * input_bytes;
  alignas(64) float sums[kRing][kAmxRows * kPanel];
  constexpr bool raised = !Bytes && Form::format == Format::codes4;
  const bool has_min = adds_minimum(m) || raised;
  const BlockSums input_sums = block_sums<block>(x);
  const int blocks = m.depth / block;
  const size_t stride = size_t(x.stride) * input_bytes;
  const size_t groups = size_t(x.stride / kGroup);
  BlockCursor<Form> packed(m, m.data + size_t(panel) * m.panel_bytes), scaled = packed;
  const uint8_t* inputs = Bytes ? (const uint8_t*)x.bytes : (const uint8_t*)x.bf16;
  constexpr bool is_table = Form::format == Format::table4;
  const PairTable table = Form::format == Format::codes4 ? PairTable{} : pair_table<Form>(m);
  const B byte_table = is_table ? b_signed_table(m.table) : B{};
  if (is_first)
    for (int b = 0; b < kLag && b < blocks; packed.move(m, b++))
      unpack_block<Form, Bytes>(packed.at, unpacked + b * step, table, byte_table);
  V total[R][1];
  clear(total);
  const auto block_step = [&](auto number, int b) __attribute__((always_inline)) {
    constexpr int tile = decltype(number)::value;
    if (b < blocks) {
      amx_zero<tile>();
      amx_load_stream<4 + tile % 2>(inputs + size_t(b) * block * input_bytes, stride);
      amx_load<6 + tile % 2>(unpacked + b * step, kAmxRowBytes);
      if constexpr (Bytes) {
        amx_dot_int8<tile, 4 + tile % 2, 6 + tile % 2>();
      } else {
        amx_dot_bf16<tile, 4 + tile % 2, 6 + tile % 2>();
      }
      if (is_first && b + kLag < blocks) {
        unpack_block<Form, Bytes>(packed.at, unpacked + (b + kLag) * step, table, byte_table);
        packed.move(m, b + kLag);
      }
    }
    if (b >= kStore && b < blocks + kStore) amx_store<(tile + kStore) % 4>(sums[(b - kStore) % kRing], kAmxRowBytes);
    if (b >= kLag && b < blocks + kLag) {
      const int done = b - kLag;
      const float* from = sums[done % kRing];
      const float* scales = Bytes ? x.scales + size_t(done) * block / kGroup : nullptr;
      V scale, minimum, sum[R][1];
      scaled.load_scales(m, scale, minimum);
      scaled.move(m, done);
      if (raised) minimum = v_fma(scale, v_set(-kCodeBias), minimum);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
        sum[r][0] =
            Bytes ? v_mul(s_float4(s_load(from + r * kPanel)), v_set(scales[r * groups])) : v_load(from + r * kPanel);
      add_column(total, sum, 0, scale, minimum, has_min, input_sums.sums + done, input_sums.stride, identity);
    }
  };
  for (int b = 0; b < blocks + kLag; b += 4) {
    block_step(Count<0>{}, b);
    block_step(Count<1>{}, b + 1);
    block_step(Count<2>{}, b + 2);
    block_step(Count<3>{}, b + 3);
  }
  store(total, out, out_stride);
}

// Computes a product with a quantized matrix, with inputs in bf16 or int8; see `product` for `epilogue`.
template <bool Bytes, class Epilogue>
static void amx_product_codes(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch,
                              Epilogue&& epilogue) {
  alignas(64) float out[kAmxRows * 2 * kPanel];
  const int tall = rows < kAmxRows ? rows : kAmxRows;
  with_codes(m, [&](auto form) {
    using Form = decltype(form);
    const AmxTiles tiles(tall, Form::block * (Bytes ? 1 : 2));
    for (int p = 0, columns; p < panels; p += columns) {
      columns = panels - p >= 2 ? 2 : 1;
      for (int row = 0, done; row < rows; row += done) {
        const int begin = tile_begin(row, rows, tall);
        const Rows inputs = x.from(begin);
        with_count<kAmxRows>(tall, [&](auto count) {
          for (int c = 0; c < columns; ++c)
            amx_tile_codes<Form, Bytes, decltype(count)::value>(m, panel + p + c, inputs,
                                                                scratch + size_t(c) * m.depth * 32, row == 0,
                                                                out + c * kPanel, columns * kPanel);
        });
        done = begin + tall - row;
        epilogue(Tile{row, done, panel + p, columns, out + size_t(row - begin) * columns * kPanel});
      }
    }
  });
}
#endif

}  // namespace kvferry::KVFERRY_LEVEL
