// Quantized matrices, inputs quantized to int8 (`fast`): out = sum over blocks of
//
//   scale * x_scale * (q0 w0 + q1 w1 + ...) + minimum * x_scale * (q0 + q1 + ...)
//
// The sums in parentheses are integers, so they are exact in any order and identical on every level. The scale of each
// group of 32 inputs is its largest magnitude / 127 (as in ggml's Q8_0 and Q8_1; Dettmers et al., LLM.int8(), 2022,
// section 2). Quantized weights w are unpacked in registers, with three operations per 64 bytes of a panel; for many
// rows, 8-bit weights are unpacked once into scratch memory. On levels without bf16 dot products, products of more than
// kByteRows rows use words.hpp. On a level that computes any number of rows here, outputs with one scale for all inputs
// (W8A8 checkpoints) are multiplied by that scale once, at the end, which rounds differently from other levels.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/codes.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

#if KVFERRY_PAIRS
constexpr int kByteRows = 6;
#else
constexpr int kByteRows = 3;
#endif

// Table of the values that nibbles stand for, in the form of a format's quads.
template <class Form>
static inline B quad_table(const Matrix& m) {
  return Form::format == Format::table4 ? b_table(m.table) : B{};
}

// Unpacks a group to quads of each output, biased as `s_start8` expects unless the values have 4 bits.
template <class Form>
[[gnu::always_inline]] static inline void unpack_quads(const uint8_t* at, B table, B (&quads)[Form::inputs / 4]) {
  if constexpr (has_nibbles(Form::format)) b_codes4(at, quads[0], quads[1]);
  if constexpr (Form::format == Format::table4)
    quads[0] = b_look_up(table, quads[0]), quads[1] = b_look_up(table, quads[1]);
  if constexpr (Form::format == Format::codes6) b_codes6(at, quads);
  if constexpr (Form::format == Format::codes8) quads[0] = b_codes8(at);
}

// Multiplies R rows by C panels, starting at `panel`. `unpacked`: the panels' weights from `unpack_panel_quads`, if
// AreUnpacked. With HasOneScale, the sum over all blocks is multiplied by the output's scale once.
template <class Form, int R, int C, bool AreUnpacked = false, bool HasOneScale = false>
static inline void tile_bytes(const Matrix& m, int panel, const Rows& x, float* out,
                              const uint8_t* unpacked = nullptr) {
  constexpr int block = Form::block;
  constexpr bool four = Form::format == Format::codes4;  // otherwise, values have 8 bits when they are multiplied
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  const size_t halves = size_t(x.stride / kSumWidth), groups = size_t(x.stride / kGroup);
  [[maybe_unused]] const B table = quad_table<Form>(m);
  const auto add = [](S sum, B codes, const int8_t* quad) {
    return four ? s_add4(sum, codes, inputs_at(quad)) : s_add8(sum, codes, inputs_at(quad));
  };
  V total[R][C];
  clear(total);
  BlockCursor<Form> cursor[C];
  for (int c = 0; c < C; ++c) cursor[c] = BlockCursor<Form>(m, m.data + size_t(panel + c) * m.panel_bytes);
  for (int b = 0, blocks = m.depth / block; b < blocks; ++b) {
    const uint8_t* at[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) at[c] = cursor[c].at;
    S sum[R][C];
    const int8_t* bytes = x.bytes + size_t(b) * block;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const int32_t* sums = x.byte_sums + r * halves + b * Form::halves;
      const S start = four ? s_zero() : s_start8(Form::halves == 2 ? sums[0] + sums[1] : sums[0]);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sum[r][c] = start;
    }
    const auto add_quad = [&](B codes, int c, int quad) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = add(sum[r][c], codes, bytes + size_t(r) * x.stride + quad * 4);
    };
#if KVFERRY_PAIRS
    if constexpr (AreUnpacked) {
#pragma GCC unroll 8
      for (int q = 0; q < block / 4; ++q)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c)
          add_quad(b_load(unpacked + (size_t(c) * m.depth + size_t(b) * block + size_t(q) * 4) * kPanel), c, q);
    }
#endif
    if constexpr (!AreUnpacked) {
#pragma GCC unroll 8
      for (int g = 0; g < block / Form::inputs; ++g)
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          B quads[Form::inputs / 4];
          unpack_quads<Form>(at[c] + g * Form::group, table, quads);
          if constexpr (R <= kFusedRows) prefetch_group<Form>(at[c] + g * Form::group);
#pragma GCC unroll 4
          for (int q = 0; q < Form::inputs / 4; ++q) add_quad(quads[q], c, g * Form::inputs / 4 + q);
        }
    }
    const float* scales = x.scales + b * block / kGroup;
    if constexpr (HasOneScale) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const V step = v_set(scales[r * groups]);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) total[r][c] = v_fma(s_float8(sum[r][c]), step, total[r][c]);
      }
      for (int c = 0; c < C; ++c) cursor[c].move(m, b);
      continue;
    }
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      V scale, minimum;
      cursor[c].load_scales(m, scale, minimum);
      add_column(total, sum, c, scale, minimum, has_min, inputs.sums + b, inputs.stride, [&](const S& whole, int r) {
        return v_mul(four ? s_float4(whole) : s_float8(whole), v_set(scales[r * groups]));
      });
      cursor[c].move(m, b);
    }
  }
  if constexpr (HasOneScale)
    for (int c = 0; c < C; ++c) {
      V scale, none;
      BlockCursor<Form>(m, m.data + size_t(panel + c) * m.panel_bytes).load_scales(m, scale, none);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) total[r][c] = v_mul(total[r][c], scale);
    }
  store(total, out);
}

#if KVFERRY_PAIRS
constexpr int kUnpackedRows = 24;  // with more rows, 8-bit and table weights are unpacked once for all rows

// Unpacks the quantized weights of a panel, without scales: [depth / 4][16][4].
template <class Form>
static inline void unpack_panel_quads(const Matrix& m, int panel, uint8_t* to) {
  BlockCursor<Form> cursor(m, m.data + size_t(panel) * m.panel_bytes);
  const B table = quad_table<Form>(m);
  for (int b = 0; b < m.depth / Form::block; cursor.move(m, b++))
    for (int g = 0; g < Form::block / Form::inputs; ++g) {
      B quads[Form::inputs / 4];
      unpack_quads<Form>(cursor.at + g * Form::group, table, quads);
      for (int q = 0; q < Form::inputs / 4; ++q, to += 64) b_store(to, quads[q]);
    }
}
#endif

// Multiplies any number of rows by panels [panel, panel + panels); see `product` for `scratch` and `epilogue`.
static void product_of_bytes(const Matrix& m, const Rows& x, int rows, int panel, int panels,
                             [[maybe_unused]] uint8_t* scratch, const Epilogue& epilogue) {
  alignas(64) float out[kByteRows * 2 * kPanel];
  const int step = balanced_rows(rows, kByteRows);
#if KVFERRY_PAIRS
  const bool are_unpacked = rows > kUnpackedRows && m.format != Format::codes4;
  if (are_unpacked)
    with_codes(m, [&](auto form) {
      for (int p = 0; p < panels; ++p)
        unpack_panel_quads<decltype(form)>(m, panel + p, scratch + size_t(p) * m.depth * kPanel);
    });
#endif
  for (int p = 0; p < panels;) {
    // A single row is bound by memory bandwidth, and one stream is then faster than several.
    const int columns = KVFERRY_PAIRS && rows > 1 && panels - p >= 2 ? 2 : 1;
    for (int row = 0; row < rows; row += step) {
      const Rows at = x.from(row);
      with_count<kByteRows>(rows - row < step ? rows - row : step, [&](auto count) {
        constexpr int R = decltype(count)::value;
        const auto run = [&](auto width) {
          constexpr int C = decltype(width)::value;
          with_codes(m, [&](auto form) {
            using Form = decltype(form);
#if KVFERRY_PAIRS
            if constexpr (Form::format == Format::table4 || Form::format == Format::codes6)
              if (are_unpacked)
                return tile_bytes<Form, R, C, true>(m, panel + p, at, out, scratch + size_t(p) * m.depth * kPanel);
            if constexpr (Form::format == Format::codes8) {
              const uint8_t* codes = scratch + size_t(p) * m.depth * kPanel;
              const bool has_one_scale = !KVFERRY_AMX && m.has_one_scale;  // see kByteRows
              if (are_unpacked && has_one_scale)
                return tile_bytes<Form, R, C, true, true>(m, panel + p, at, out, codes);
              if (are_unpacked) return tile_bytes<Form, R, C, true>(m, panel + p, at, out, codes);
              if (has_one_scale) return tile_bytes<Form, R, C, false, true>(m, panel + p, at, out);
            }
#endif
            tile_bytes<Form, R, C>(m, panel + p, at, out);
          });
          epilogue(Tile{row, R, panel + p, C, out});
        };
        if constexpr (KVFERRY_PAIRS)
          if (columns == 2) return run(Count<2>{});
        run(Count<1>{});
      });
    }
    p += columns;
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
