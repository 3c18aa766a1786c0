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

enum class Format : int { f32 = 0, f16 = 1, bf16 = 2, codes4 = 3, codes8 = 4, table4 = 5 };

// Whether quantized values are stored as nibbles: in codes4 the values, in table4 their indices in a table.
constexpr bool has_nibbles(Format format) { return format == Format::codes4 || format == Format::table4; }

// Layout [panel][...]; weights/pack.hpp documents the order within a panel.
struct Matrix {
  Format format = Format::f32;
  int rows = 0;              // output features
  int cols = 0;              // input features
  int panels = 0;            // rows / 16, rounded up; the last panel is padded with zeros
  int depth = 0;             // cols rounded up to kGroup, padded with zeros
  int block = 0;             // inputs per scale: 16 or 32; quantized formats only
  bool half_scales = false;  // scales and minima are float16 instead of float32
  bool has_min = false;      // value = scale * q + minimum; otherwise scale * (q + offset); q: quantized value
  float offset = 0.0f;
  bool has_one_scale = false;  // codes8 without minimum and offset: all blocks of an output have the same scale
  int8_t table[16] = {};       // table4: the quantized values
  size_t panel_bytes = 0;
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [panels * 16] or null

  int code_bytes() const { return has_nibbles(format) ? block * 8 : block * 16; }
  int scale_bytes() const { return half_scales ? 32 : 64; }
  int block_bytes() const { return code_bytes() + scale_bytes() * (has_min ? 2 : 1); }
  bool has_codes() const { return has_nibbles(format) || format == Format::codes8; }
};

}  // namespace kvferry
