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

// Quantized format with bit width, inputs per block and blocks per super-block as compile-time constants.
template <Format F, int Block, int FactorBlocks = 0>
struct Codes {
  static constexpr Format format = F;
  static constexpr int block = Block, factor_blocks = FactorBlocks;
  static constexpr int halves = Block / kSumWidth;
  static constexpr int inputs = group_inputs(F), group = group_bytes(F);  // a group's inputs and bytes
};
template <class F>
static inline void with_codes(const Matrix& m, F&& f) {
  if (m.format == Format::codes4) {
    m.factor_blocks ? f(Codes<Format::codes4, 32, 8>{}) : f(Codes<Format::codes4, 32>{});
  } else if (m.format == Format::table4) {
    f(Codes<Format::table4, 32>{});
  } else if (m.format == Format::codes6) {
    m.block == 32 ? f(Codes<Format::codes6, 32, 8>{}) : f(Codes<Format::codes6, 16, 16>{});
  } else if (m.block == 32) {
    f(Codes<Format::codes8, 32>{});
  } else {
    f(Codes<Format::codes8, 16>{});
  }
}

// A position in the blocks of a packed panel, and the factors of its super-block.
template <class Form>
struct BlockCursor {
  const uint8_t* at;
  const uint8_t* factors;

  BlockCursor() = default;
  BlockCursor(const Matrix& m, const uint8_t* panel) : at(panel + m.factor_bytes()), factors(panel) {}

  // Moves from block b to the next one.
  [[gnu::always_inline]] void move(const Matrix& m, int b) {
    at += m.block_bytes();
    if (Form::factor_blocks && (b + 1) % (Form::factor_blocks ? Form::factor_blocks : 1) == 0) {
      factors = at;
      at += m.factor_bytes();
    }
  }
  // Scales and minima of the block, as float32.
  [[gnu::always_inline]] void load_scales(const Matrix& m, V& scale, V& minimum) const {
    const uint8_t* scales = at + m.code_bytes();
    const auto load = [&m](const uint8_t* values, const uint8_t* factor) {
      if constexpr (Form::factor_blocks)
        return v_mul(v_load_half((const uint16_t*)factor), v_load_bytes((const int8_t*)values));
      return m.half_scales ? v_load_half((const uint16_t*)values) : v_load((const float*)values);
    };
    scale = load(scales, factors);
    minimum = m.has_min ? load(scales + m.scale_bytes(), factors + 32) : v_mul(scale, v_set(m.offset));
  }
};

// Prefetches a later part of the weight stream, one group after another.
template <class Form>
[[gnu::always_inline]] static inline void prefetch_group(const uint8_t* at) {
#pragma GCC unroll 3
  for (int line = 0; line < Form::group; line += 64) prefetch(at + line + kPrefetchBytes);
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

#if KVFERRY_PAIRS
static inline V identity(V sum, int) { return sum; }

// The bfloat16 values of nibbles, or of 6 bits.
struct PairTable {
  P lower, upper;
};
template <class Form>
static inline PairTable pair_table(const Matrix& m) {
  PairTable table = {};
  if constexpr (Form::format == Format::codes6) p_table6(table.lower, table.upper);
  if constexpr (Form::format == Format::codes4) table.lower = p_table4();
  if constexpr (Form::format == Format::table4) table.lower = p_table(m.table);
  return table;
}

// A group of packed weights in registers, of which each pair of inputs is unpacked to bfloat16.
template <class Form>
struct PairGroup {
  const uint8_t* at;
  P words[4];

  [[gnu::always_inline]] void load(const uint8_t* from) {
    at = from;
    if constexpr (has_nibbles(Form::format)) words[0] = p_load(at);
    if constexpr (Form::format == Format::codes6) {
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) words[i] = p_load(at + 64 * i);
      words[3] = p_last6(words[0], words[1], words[2]);
    }
  }
  [[gnu::always_inline]] P pair(const PairTable& table, int i) const {
    if constexpr (has_nibbles(Form::format)) return p_code4(words[0], table.lower, i);
    if constexpr (Form::format == Format::codes6) return p_code6(words[i / 2], table.lower, table.upper, i % 2);
    return p_codes8((const int8_t*)at + 32 * i);
  }
};

// sum += rows of x, starting at input `start`, times a block of each of C packed panels.
template <class Form, int R, int C>
[[gnu::always_inline]] static inline void add_block(V (&sum)[R][C], const BlockCursor<Form> (&from)[C], const Rows& x,
                                                    int start, const PairTable& table) {
  const uint8_t* at[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; ++c) at[c] = from[c].at;
  const uint16_t* inputs = x.bf16 + start;
#pragma GCC unroll 1
  for (int g = 0; g < Form::block / Form::inputs; ++g) {
    PairGroup<Form> group[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      group[c].load(at[c] + g * Form::group);
      prefetch_group<Form>(at[c] + g * Form::group);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Form::inputs / 2; ++i) {
      P panel[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) panel[c] = group[c].pair(table, i);
      add_pair(sum, inputs + g * Form::inputs + 2 * i, x.stride, panel);
    }
  }
}

template <class Form, int R, int C>
static inline void fused_codes(const Matrix& m, int panel, const Rows& x, float* out) {
  constexpr int block = Form::block;
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  const PairTable table = pair_table<Form>(m);
  V total[R][C];
  clear(total);
  BlockCursor<Form> at[C];
  for (int c = 0; c < C; ++c) at[c] = BlockCursor<Form>(m, m.data + size_t(panel + c) * m.panel_bytes);
  for (int b = 0, blocks = m.depth / block; b < blocks; ++b) {
    V sum[R][C];
    clear(sum);
    add_block(sum, at, x, b * block, table);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      V scale, minimum;
      at[c].load_scales(m, scale, minimum);
      add_column(total, sum, c, scale, minimum, has_min, inputs.sums + b, inputs.stride, identity);
      at[c].move(m, b);
    }
  }
  store(total, out);
}
#endif

}  // namespace kvferry::KVFERRY_LEVEL
