// Products of quantized matrices on AMX tiles: amx_products.hpp declares them.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/amx.hpp"
#include "simd/simd.hpp"
#include "products/amx_products.hpp"
#include "products/codes.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

#if KVFERRY_AMX
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

// Whether `with_row_pairs` calls an instance for R rows with R rows only. Most tiles have all rows.
template <int R>
constexpr bool kIsExact = R == 1 || R >= kAmxRows - 1;

// Calls f(Count<R>) for the least R that is 1, even, or above 14, and at least `rows`: an instance for every number of
// rows would double the time to compile, and one row more costs less than a block's loads.
template <class F>
static inline void with_row_pairs(int rows, F&& f) {
  if (rows == 1) {
    f(Count<1>{});
  } else if (rows == kAmxRows - 1) {
    f(Count<kAmxRows - 1>{});
  } else {
    with_count<kAmxRows / 2>((rows + 1) / 2, [&](auto pairs) { f(Count<2 * decltype(pairs)::value>{}); });
  }
}

// out [R][16] with row stride `out_stride` = `rows` rows of x times a quantized panel: the sum in codes.hpp, or, if
// `Bytes`, in bytes.hpp. If `rows` is R - 1, the last row is computed and stored twice. Every block's
// accumulator is stored, since the block's scales are applied in vector registers. The loop
// is software-pipelined: block b is multiplied, block b - 2 is stored and block b - 4 is loaded and scaled, so that no
// load waits for the matrix unit. `unpacked` contains the panel as weight tiles; the first row tile fills it for all
// row tiles.
template <class Form, bool Bytes, int R>
[[gnu::noinline]] static void amx_tile_codes(const Matrix& m, int panel, const Rows& x, int rows, uint8_t* unpacked,
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
  const auto row = [last = size_t(rows - 1)](int r) { return kIsExact<R> || r + 1 < R ? size_t(r) : last; };
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
      const float* sums_of_inputs = input_sums.sums + done;
      V scale, minimum, sum[R][1];
      scaled.load_scales(m, scale, minimum);
      scaled.move(m, done);
      if (raised) minimum = v_fma(scale, v_set(-kCodeBias), minimum);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float* at = from + row(r) * kPanel;
        sum[r][0] = Bytes ? v_mul(s_float4(s_load(at)), v_set(scales[row(r) * groups])) : v_load(at);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) total[r][0] = v_fma(scale, sum[r][0], total[r][0]);
      if (has_min)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
          total[r][0] = v_fma(minimum, v_set(sums_of_inputs[row(r) * input_sums.stride]), total[r][0]);
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

template <bool Bytes>
void amx_product_codes(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch,
                       const Epilogue& epilogue) {
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
        with_row_pairs(tall, [&](auto count) {
          for (int c = 0; c < columns; ++c)
            amx_tile_codes<Form, Bytes, decltype(count)::value>(m, panel + p + c, inputs, tall,
                                                                scratch + size_t(c) * m.depth * 32, row == 0,
                                                                out + c * kPanel, columns * kPanel);
        });
        done = begin + tall - row;
        epilogue(Tile{row, done, panel + p, columns, out + size_t(row - begin) * columns * kPanel});
      }
    }
  });
}
template void amx_product_codes<false>(const Matrix&, const Rows&, int, int, int, uint8_t*, const Epilogue&);
template void amx_product_codes<true>(const Matrix&, const Rows&, int, int, int, uint8_t*, const Epilogue&);
#endif

}  // namespace kvferry::KVFERRY_LEVEL
