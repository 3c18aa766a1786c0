// Quantized matrices on levels without bf16 dot products, inputs quantized to int16 (`exact`): out = sum over blocks of
//
//   scale * x_scale * (q0 w0 + q1 w1 + ...) + minimum * x_scale * (q0 + q1 + ...)
//
// The sums in parentheses are integers, so they are exact in any order. The scale of each group of 32 inputs is its
// largest magnitude / 32767. For the largest input this is 128 times finer than bfloat16, and AVX2 computes two int16
// products in the time of one float product. For small inputs next to large inputs it is too coarse if the KV is in
// float32; the rounding error of a word is then stored as a second int16, the low word, and both words together have
// more bits than a float. For few rows, the quantized weights w are unpacked in registers; for more rows, a panel is
// unpacked into scratch memory once. Many rows with int8 inputs (`fast`) use this path as well: the integers are the
// same, and int8 would not be faster.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/codes.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

#if !KVFERRY_PAIRS
constexpr int kWordRows = 4;

// Bytes of an unpacked block: weights as int16, 16 scales and 16 minima as floats.
static inline constexpr size_t unpacked_block(int block) { return size_t(block) * kPanel * 2 + 2 * kPanel * 4; }

// Table of the values that nibbles stand for; used by table4 only.
template <class Form>
static inline W word_table(const Matrix& m) {
  return Form::format == Format::table4 ? w_table(m.table) : W{};
}

// A group of packed weights, of which each pair of inputs is unpacked to int16.
template <class Form>
struct WordGroup {
  const uint8_t* at;
  W words[4];

  [[gnu::always_inline]] explicit WordGroup(const uint8_t* from) : at(from) {
    if constexpr (has_nibbles(Form::format)) words[0] = w_load((const int16_t*)at);
    if constexpr (Form::format == Format::codes6) {
#pragma GCC unroll 3
      for (int i = 0; i < 3; ++i) words[i] = w_load((const int16_t*)(at + 64 * i));
      words[3] = w_last6(words[0], words[1], words[2]);
    }
  }
  [[gnu::always_inline]] W pair(W table, int i) const {
    if constexpr (Form::format == Format::codes4) return w_code4(words[0], i);
    if constexpr (Form::format == Format::table4) return w_table4(words[0], table, i);
    if constexpr (Form::format == Format::codes6) return w_code6(words[i / 2], i % 2);
    return w_codes8((const int8_t*)at + 32 * i);
  }
};

template <class Form>
static inline void unpack_words(const Matrix& m, int panel, uint8_t* to) {
  BlockCursor<Form> from(m, m.data + size_t(panel) * m.panel_bytes);
  const W table = word_table<Form>(m);
  for (int b = 0, blocks = m.depth / Form::block; b < blocks; from.move(m, b++), to += unpacked_block(Form::block)) {
    int16_t* codes = (int16_t*)to;
    for (int g = 0; g < Form::block / Form::inputs; ++g) {
      const WordGroup<Form> group(from.at + g * Form::group);
#pragma GCC unroll 8
      for (int i = 0; i < Form::inputs / 2; ++i, codes += 2 * kPanel) w_store(codes, group.pair(table, i));
    }
    V scale, minimum;
    from.load_scales(m, scale, minimum);
    float* scales = (float*)codes;
    v_store(scales, scale);
    v_store(scales + kPanel, minimum);
  }
}

// Multiplies R rows by a panel that is either packed or unpacked by `unpack_words`.
template <class Form, int R, bool IsPacked, bool HasLowWords>
static inline void tile_words(const Matrix& m, const uint8_t* at, const Rows& x, float* out) {
  constexpr int block = Form::block;
  const bool has_min = adds_minimum(m);
  const BlockSums inputs = block_sums<block>(x);
  const size_t groups = size_t(x.stride / kGroup);
  const W table = word_table<Form>(m);
  V total[R][1];
  clear(total);
  BlockCursor<Form> packed(m, at);
  for (int b = 0, blocks = m.depth / block; b < blocks; ++b) {
    if constexpr (IsPacked) at = packed.at;
    const int16_t* words = x.words + size_t(b) * block;
    [[maybe_unused]] const int16_t* low_words = HasLowWords ? x.low_words + size_t(b) * block : nullptr;
    I sum[R][1];
    [[maybe_unused]] I low_sum[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum[r][0] = i_zero();
      if constexpr (HasLowWords) low_sum[r] = i_zero();
    }
    const auto add = [&](W codes, int pair) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const size_t at = size_t(r) * x.stride + 2 * pair;
        sum[r][0] = i_add(sum[r][0], codes, inputs_at(words + at));
        if constexpr (HasLowWords) low_sum[r] = i_add(low_sum[r], codes, inputs_at(low_words + at));
      }
    };
    V scale, minimum;
    if constexpr (!IsPacked) {
      const int16_t* codes = (const int16_t*)at;
#pragma GCC unroll 1
      for (int i = 0; i < block / 2; ++i) add(w_load(codes + i * 2 * kPanel), i);
      scale = v_load((const float*)(codes + block * kPanel));
      minimum = v_load((const float*)(codes + block * kPanel) + kPanel);
      at += unpacked_block(block);
    } else {
#pragma GCC unroll 1
      for (int g = 0; g < block / Form::inputs; ++g) {
        prefetch_group<Form>(at + g * Form::group);
        const WordGroup<Form> group(at + g * Form::group);
#pragma GCC unroll 8
        for (int i = 0; i < Form::inputs / 2; ++i) add(group.pair(table, i), g * Form::inputs / 2 + i);
      }
      packed.load_scales(m, scale, minimum);
      packed.move(m, b);
    }
    const float* scales = x.scales + b * block / kGroup;
    add_column(total, sum, 0, scale, minimum, has_min, inputs.sums + b, inputs.stride, [&](const I& whole, int r) {
      V value = i_float(whole);
      if constexpr (HasLowWords) value = v_fma(i_float(low_sum[r]), v_set(1.0f / kLowWordSteps), value);
      return v_mul(value, v_set(scales[r * groups]));
    });
  }
  store(total, out);
}

// Multiplies any number of rows by panels [panel, panel + panels); see `product` for `scratch` and `epilogue`.
static void product_of_words(const Matrix& m, const Rows& x, int rows, int panel, int panels, uint8_t* scratch,
                             const Epilogue& epilogue) {
  alignas(64) float out[kWordRows * kPanel];
  const int step = balanced_rows(rows, kWordRows);
  with_codes(m, [&](auto form) {
    using Form = decltype(form);
    for (int p = panel; p < panel + panels; ++p) {
      const bool is_packed = rows <= kWordRows;
      if (!is_packed) unpack_words<Form>(m, p, scratch);
      for (int row = 0; row < rows; row += step) {
        const Rows at = x.from(row);
        with_count<kWordRows>(rows - row < step ? rows - row : step, [&](auto count) {
          constexpr int R = decltype(count)::value;
          const uint8_t* data = is_packed ? m.data + size_t(p) * m.panel_bytes : scratch;
          if (x.forms.low_words) {
            is_packed ? tile_words<Form, R, true, true>(m, data, at, out)
                      : tile_words<Form, R, false, true>(m, data, at, out);
          } else {
            is_packed ? tile_words<Form, R, true, false>(m, data, at, out)
                      : tile_words<Form, R, false, false>(m, data, at, out);
          }
          epilogue(Tile{row, R, p, 1, out});
        });
      }
    }
  });
}
#endif

}  // namespace kvferry::KVFERRY_LEVEL
