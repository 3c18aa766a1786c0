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

constexpr int kLeast6 = -32;  // the smallest value in codes6, which is added to the stored bits

// Whether quantized values are stored as nibbles: in codes4 the values, in table4 their indices in a table.
constexpr bool has_nibbles(Format format) { return format == Format::codes4 || format == Format::table4; }

// Inputs and bytes of a group, the unit in which a packed panel is unpacked.
constexpr int group_inputs(Format format) { return format == Format::codes6 ? 16 : has_nibbles(format) ? 8 : 4; }
constexpr int group_bytes(Format format) { return format == Format::codes6 ? 192 : 64; }

// Layout [panel][...]; weights/pack.hpp documents the order within a panel.
struct Matrix {
  Format format = Format::f32;
  int rows = 0;              // output features
  int cols = 0;              // input features
  int panels = 0;            // rows / 16, rounded up; the last panel is padded with zeros
  int depth = 0;             // cols rounded up to kGroup, padded with zeros
  int block = 0;             // inputs per scale: 16 or 32; quantized formats only
  bool half_scales = false;  // scales and minima are float16 instead of float32
  int factor_blocks = 0;     // blocks whose scales are 8-bit multiples of common factors, a power of two; 0: none
  bool has_min = false;      // value = scale * q + minimum; otherwise scale * (q + offset); q: quantized value
  float offset = 0.0f;
  bool has_one_scale = false;  // codes8 without minimum and offset: all blocks of an output have the same scale
  int8_t table[16] = {};       // table4: the quantized values
  size_t panel_bytes = 0;
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [panels * 16] or null

  int code_bytes() const { return block / group_inputs(format) * group_bytes(format); }
  int scale_bytes() const { return factor_blocks ? 16 : half_scales ? 32 : 64; }
  int block_bytes() const { return code_bytes() + scale_bytes() * (has_min ? 2 : 1); }
  // Float16 factors of a super-block: of scales, then of minima.
  int factor_bytes() const { return factor_blocks ? (has_min ? 64 : 32) : 0; }
  // Bytes of the first `blocks` blocks of a panel, with the factors of every complete super-block.
  size_t bytes_of(int blocks) const {
    return size_t(blocks) * size_t(block_bytes()) + size_t(factor_blocks ? blocks / factor_blocks : 0) * factor_bytes();
  }
  // Offsets of a block and of its factors in a panel.
  size_t block_at(int b) const { return bytes_of(b) + size_t(factor_bytes()); }
  size_t factors_at(int b) const { return factor_blocks ? bytes_of(b - b % factor_blocks) : 0; }
  bool has_codes() const { return has_nibbles(format) || format == Format::codes6 || format == Format::codes8; }
};

}  // namespace kvferry
