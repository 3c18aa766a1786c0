// Matrix products over packed panels: dispatch by format, number of rows and level.
//
//   f32, f16, bf16   out = x0 w0 + x1 w1 + ...
//   quantized        codes.hpp, amx_products.hpp, or words.hpp without bf16 dot products; bytes.hpp for int8 inputs
//
// With few rows, the packed panel is streamed once and unpacked in registers (`fused`). With many rows, a few panels
// are unpacked into scratch memory that fits the L2 cache and are multiplied with register tiles. Both paths use the
// same arithmetic.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/amx_products.hpp"
#include "products/bytes.hpp"
#include "products/codes.hpp"
#include "products/products.hpp"
#include "products/tiles.hpp"
#include "products/words.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Multiplies R rows by C 16-bit panels on a level that multiplies floats.
template <Format F, int R, int C>
static inline void fused_16bit(const Matrix& m, int panel, const Rows& x, float* out) {
  V sum[R][C];
  clear(sum);
  const uint8_t* at[C];
  for (int c = 0; c < C; ++c) at[c] = m.data + size_t(panel + c) * m.panel_bytes;
  for (int i = 0; i < m.depth; i += 2) {
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      V first, second;
      prefetch(at[c] + size_t(i) * 32 + kPrefetchBytes);
      if constexpr (F == Format::bf16) {
        v_load_pairs((const uint16_t*)at[c] + size_t(i) * kPanel, first, second);
      } else {
        first = v_load_half((const uint16_t*)at[c] + size_t(i) * kPanel);
        second = v_load_half((const uint16_t*)at[c] + size_t(i + 1) * kPanel);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = v_fma(v_set(x.f32[size_t(r) * x.stride + i]), first, sum[r][c]);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sum[r][c] = v_fma(v_set(x.f32[size_t(r) * x.stride + i + 1]), second, sum[r][c]);
    }
  }
  store(sum, out);
}

// Converts a 16-bit panel to floats.
static inline void unpack_panel(const Matrix& m, int panel, float* wide) {
  const uint16_t* at = (const uint16_t*)(m.data + size_t(panel) * m.panel_bytes);
  for (int i = 0; i < m.depth; i += 2, at += 2 * kPanel, wide += 2 * kPanel) {
    V first, second;
    if (m.format == Format::bf16) {
      v_load_pairs(at, first, second);
    } else {
      first = v_load_half(at);
      second = v_load_half(at + kPanel);
    }
    v_store(wide, first);
    v_store(wide + kPanel, second);
  }
}

// Multiplies R rows by C panels, starting at `panel`.
template <int R, int C>
static inline void fused(const Matrix& m, int panel, const Rows& x, float* out) {
  const uint8_t* data = m.data + size_t(panel) * m.panel_bytes;
  switch (m.format) {
    case Format::f32: tile_f32<R, C>(x.f32, x.stride, (const float*)data, m.panel_bytes / 4, m.depth, out); break;
    case Format::f16: fused_16bit<Format::f16, R, C>(m, panel, x, out); break;
    case Format::bf16:
#if KVFERRY_PAIRS
      tile_bf16<R, C>(x.bf16, x.stride, data, m.panel_bytes, m.depth / 2, out);
#else
      fused_16bit<Format::bf16, R, C>(m, panel, x, out);
#endif
      break;
    case Format::codes4:
    case Format::table4:
    case Format::codes6:
    case Format::codes8:
#if KVFERRY_PAIRS
      with_codes(m, [&](auto form) { fused_codes<decltype(form), R, C>(m, panel, x, out); });
#endif
      break;
  }
}

// Number of columns of a fused tile when `left` panels remain.
static inline int fused_columns(const Matrix& m, int rows, int left) {
  // For 8 and 16 bits per weight, one memory stream is faster than four. For fewer bits, a single panel's chain of bf16
  // dot products is slower than memory. In codes6, more than 2 panels of more than 2 rows do not fit the registers.
  const bool is_six = m.format == Format::codes6, is_narrow = has_nibbles(m.format) || is_six;
  const int few = takes_pairs(m.format) && !is_narrow ? 1 : 4, max_pairs = rows <= 2 ? few : is_six ? 2 : 4;
  const int max_floats = rows == 1 ? 4 : 1;
  const int max_tile = KVFERRY_PAIRS ? max_pairs : max_floats;
  return left >= max_tile ? max_tile : max_tile > 2 && left >= 2 ? 2 : 1;
}

static void product_fused(const Matrix& m, const Rows& x, int rows, int panel, int panels, const Epilogue& epilogue) {
  alignas(64) float out[kFusedRows * kChunkPanels * kPanel];
  const int step = balanced_rows(rows, kFusedRows);
  for (int p = 0, columns; p < panels; p += columns) {
    columns = fused_columns(m, rows, panels - p);
    for (int row = 0; row < rows; row += step) {
      const Rows at = x.from(row);
      with_count<kFusedRows>(rows - row < step ? rows - row : step, [&](auto count) {
        constexpr int R = decltype(count)::value;
        if constexpr (KVFERRY_PAIRS || R == 1) {  // see fused_columns
          if (columns == 4) fused<R, 4>(m, panel + p, at, out);
          if (columns == 2) fused<R, 2>(m, panel + p, at, out);
        }
        if (columns == 1) fused<R, 1>(m, panel + p, at, out);
        epilogue(Tile{row, R, panel + p, columns, out});
      });
    }
  }
}

void product(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch,
             const Epilogue& epilogue) {
#if KVFERRY_AMX
  if (m.format == Format::bf16) return amx_product_bf16(m, x, rows, panel, panels, epilogue);
  if (m.has_codes() && !x.forms.bytes) return amx_product_codes<false>(m, x, rows, panel, panels, scratch, epilogue);
  if (m.has_codes() && rows > kByteRows) return amx_product_codes<true>(m, x, rows, panel, panels, scratch, epilogue);
#endif
  if (x.forms.bytes && m.has_codes() && (KVFERRY_PAIRS || rows <= kByteRows))
    return product_of_bytes(m, x, rows, panel, panels, scratch, epilogue);
#if !KVFERRY_PAIRS
  if (m.has_codes()) return product_of_words(m, x, rows, panel, panels, scratch, epilogue);
#endif
  if (rows <= kFusedRows || m.has_codes()) return product_fused(m, x, rows, panel, panels, epilogue);
  alignas(64) float out[kTileRows * kChunkPanels * kPanel];
  const int step = balanced_rows(rows, kTileRows);
  const bool pairs = takes_pairs(m.format), is_direct = pairs || m.format == Format::f32;
  float* unpacked = (float*)scratch;
  const size_t unpacked_stride = size_t(m.depth) * kPanel;
  if (!is_direct)
    for (int p = 0; p < panels; ++p) unpack_panel(m, panel + p, unpacked + p * unpacked_stride);
  for (int row = 0; row < rows; row += step) {
    const Rows at = x.from(row);
    with_count<kTileRows>(rows - row < step ? rows - row : step, [&](auto number) {
      constexpr int R = decltype(number)::value;
      for (int p = 0, columns; p < panels; p += columns) {
        columns = tile_columns(panels - p);
        const uint8_t* data = m.data + size_t(panel + p) * m.panel_bytes;
        with_columns(columns, [&](auto width) {
          constexpr int C = decltype(width)::value;
#if KVFERRY_PAIRS
          if (pairs) return tile_bf16<R, C>(at.bf16, at.stride, data, m.panel_bytes, m.depth / 2, out);
#endif
          const float* wide = is_direct ? (const float*)data : unpacked + p * unpacked_stride;
          tile_f32<R, C>(at.f32, at.stride, wide, is_direct ? m.panel_bytes / 4 : unpacked_stride, m.depth, out);
        });
        epilogue(Tile{row, R, panel + p, columns, out});
      }
    });
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
