// Quantized matrices, inputs in bf16 (`exact`): out = sum over blocks of
//
//   scale * (x0 w0 + x1 w1 + ...) + minimum * (x0 + x1 + ...)
//
// Levels with bf16 dot products unpack the quantized weights w in registers for any number of rows (`fused_codes`):
// unpacking uses execution ports that the dot products leave idle. Other levels use words.hpp.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Quantized format with bit width and block size as compile-time constants. Formats with nibbles have blocks of 32.
template <Format F, int Block>
struct Codes {
  static constexpr Format format = F;
  static constexpr int block = Block;
  static constexpr int halves = Block / kSumWidth;
};
template <class F>
static inline void with_codes(const Matrix& m, F&& f) {
  if (m.format == Format::codes4) {
    f(Codes<Format::codes4, 32>{});
  } else if (m.format == Format::table4) {
    f(Codes<Format::table4, 32>{});
  } else if (m.block == 32) {
    f(Codes<Format::codes8, 32>{});
  } else {
    f(Codes<Format::codes8, 16>{});
  }
}

// Sums of the inputs of each block; `stride` floats per row.
struct BlockSums {
  const float* sums;
  size_t stride;
};
template <int Block>
static inline BlockSums block_sums(const Rows& x) {
  return Block == kGroup ? BlockSums{x.group_sums, size_t(x.stride / kGroup)}
                         : BlockSums{x.half_sums, size_t(x.stride / kSumWidth)};
}

// Adds column c of a block to the accumulators; `value(sum, row)` converts a block's sum to float.
template <int R, int C, class Sum, class Value>
[[gnu::always_inline]] static inline void add_column(V (&total)[R][C], const Sum (&sum)[R][C], int c, V scale,
                                                     V minimum, bool has_min, const float* inputs, size_t stride,
                                                     Value&& value) {
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) total[r][c] = v_fma(scale, value(sum[r][c], r), total[r][c]);
  if (!has_min) return;
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) total[r][c] = v_fma(minimum, v_set(inputs[r * stride]), total[r][c]);
}

static inline bool adds_minimum(const Matrix& m) { return m.has_min || m.offset != 0.0f; }

// Scales and minima of a block in a packed panel, as float32.
static inline void load_scales(const Matrix& m, const uint8_t* at, V& scale, V& minimum) {
  scale = m.half_scales ? v_load_half((const uint16_t*)at) : v_load((const float*)at);
  if (m.has_min) {
    at += m.scale_bytes();
    minimum = m.half_scales ? v_load_half((const uint16_t*)at) : v_load((const float*)at);
  } else {
    minimum = v_mul(scale, v_set(m.offset));
  }
}

#if KVFERRY_PAIRS
static inline V identity(V sum, int) { return sum; }

// Returns the table of the bfloat16 value of each nibble.
template <class Form>
static inline P nibble_table(const Matrix& m) {
  return Form::format == Format::table4 ? p_table(m.table) : p_table4();
}

// sum += rows of x, starting at input `start`, times a block of each of C packed panels, starting at `at`. `table`: the
// values of nibbles, if the format has them.
template <class Form, int R, int C>
[[gnu::always_inline]] static inline void add_block(V (&sum)[R][C], const uint8_t* const (&at)[C], const Rows& x,
                                                    int start, P table) {
  const uint16_t* inputs = x.bf16 + start;
  if constexpr (has_nibbles(Form::format)) {
#pragma GCC unroll 1
    for (int g = 0; g < Form::block / 8; ++g) {
      P packed[C], panel[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        packed[c] = p_load(at[c] + g * 64);
        prefetch(at[c] + g * 64 + kPrefetchBytes);
      }
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) panel[c] = p_code4(packed[c], table, i);
        add_pair(sum, inputs + g * 8 + 2 * i, x.stride, panel);
      }
    }
  } else {
    for (int i = 0; i < Form::block / 2; ++i) {
      P panel[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) {
        if (i % 2 == 0) prefetch(at[c] + i * 32 + kPrefetchBytes);
        panel[c] = p_codes8((const int8_t*)at[c] + i * 32);
      }
      add_pair(sum, inputs + 2 * i, x.stride, panel);
    }
  }
}

template <class Form, int R, int C>
static inline void fused_codes(const Matrix& m, int panel, const Rows& x, float* out) {
  constexpr int block = Form::block;
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  const P table = nibble_table<Form>(m);
  V total[R][C];
  clear(total);
  const uint8_t* at[C];
  for (int c = 0; c < C; ++c) at[c] = m.data + size_t(panel + c) * m.panel_bytes;
  for (int b = 0, blocks = m.depth / block; b < blocks; ++b) {
    V sum[R][C];
    clear(sum);
    add_block<Form>(sum, at, x, b * block, table);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      V scale, minimum;
      load_scales(m, at[c] + m.code_bytes(), scale, minimum);
      add_column(total, sum, c, scale, minimum, has_min, inputs.sums + b, inputs.stride, identity);
      at[c] += m.block_bytes();
    }
  }
  store(total, out);
}
#endif

}  // namespace kvferry::KVFERRY_LEVEL
