// Packed matrix: panels of 16 outputs. weights/pack.hpp documents the order within a panel.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvferry {

constexpr int kPanel = 16;     // outputs per panel
constexpr int kGroup = 32;     // the input dimension is padded to a multiple of this
constexpr int kSumWidth = 16;  // inputs per precomputed sum; sums are multiplied by the minima of a block

// Nibble index of each of the 4 input pairs in a group of 8 inputs in codes4: 0 2 1 3. Two pairs that are two nibbles
// apart form a quad, so one mask extracts a quad from a pair of words, and one shift extracts a pair.
constexpr int nibble_of_pair(int pair) { return pair == 1 ? 2 : pair == 2 ? 1 : pair; }

enum class Format : int { f32 = 0, f16 = 1, bf16 = 2, codes4 = 3, codes8 = 4, table4 = 5, codes6 = 6 };

// Whether quantized values are stored as nibbles: in codes4 the values, in table4 their indices in a table, in codes6
// their lower bits.
constexpr bool has_nibbles(Format format) {
  return format == Format::codes4 || format == Format::table4 || format == Format::codes6;
}

// Bytes of a group of 8 inputs in a format with nibbles.
constexpr int group_bytes(Format format) { return format == Format::codes6 ? 96 : 64; }

// Layout [panel][...]; weights/pack.hpp documents the order within a panel.
struct Matrix {
  Format format = Format::f32;
  int rows = 0;              // output features
  int cols = 0;              // input features
  int panels = 0;            // rows / 16, rounded up; the last panel is padded with zeros
  int depth = 0;             // cols rounded up to kGroup, padded with zeros
  int block = 0;             // inputs per scale: 16 or 32; quantized formats only
  bool half_scales = false;  // scales and minima are float16 instead of float32
  int super = 0;             // blocks whose scales are 8-bit multiples of common factors, a power of two; 0: none
  bool has_min = false;      // value = scale * q + minimum; otherwise scale * (q + offset); q: quantized value
  float offset = 0.0f;
  bool has_one_scale = false;  // codes8 without minimum and offset: all blocks of an output have the same scale
  int8_t table[16] = {};       // table4: the quantized values
  int low = 0;                 // codes6: added to the stored values, which have no sign
  size_t panel_bytes = 0;
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [panels * 16] or null

  int code_bytes() const { return has_nibbles(format) ? block / 8 * group_bytes(format) : block * 16; }
  int scale_bytes() const { return super ? 16 : half_scales ? 32 : 64; }
  int block_bytes() const { return code_bytes() + scale_bytes() * (has_min ? 2 : 1); }
  // Float16 factors of a super-block: of scales, then of minima.
  int factor_bytes() const { return super ? (has_min ? 64 : 32) : 0; }
  // Offset of a block in a panel, and of its factors.
  size_t block_at(int b) const {
    return size_t(b) * size_t(block_bytes()) + (super ? size_t(b / super + 1) * size_t(factor_bytes()) : 0);
  }
  size_t factors_at(int b) const {
    return super ? size_t(b / super) * size_t(super * block_bytes() + factor_bytes()) : 0;
  }
  size_t coded_bytes() const {
    const int blocks = depth / block;
    return size_t(blocks) * size_t(block_bytes()) + (super ? size_t(blocks / super) * size_t(factor_bytes()) : 0);
  }
  bool has_codes() const { return has_nibbles(format) || format == Format::codes8; }
};

// A position in the blocks of a packed panel, and the factors of its super-block.
struct BlockCursor {
  const uint8_t* at;
  const uint8_t* factors;

  BlockCursor() = default;
  BlockCursor(const Matrix& m, const uint8_t* panel) : at(panel + m.factor_bytes()), factors(panel) {}

  // Moves from block b to the next one.
  void move(const Matrix& m, int b) {
    at += m.block_bytes();
    if (m.super && (b + 1) % m.super == 0) {
      factors = at;
      at += m.factor_bytes();
    }
  }
};

}  // namespace kvferry
