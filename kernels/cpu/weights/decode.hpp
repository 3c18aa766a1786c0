// Decodes rows of files to quantized values, scales and minima.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "weights/pack.hpp"

namespace kvferry {

struct RowTraits {
  int width;       // values per stored block
  int bytes;       // bytes per stored block
  int block;       // values per scale; 0: not quantized
  bool wide_code;  // quantized values need 8 bits
  bool half_scales, has_min;
  float offset;                   // added to every quantized value, if the offset is the same for all
  const int8_t* table = nullptr;  // [16] or null: the quantized values that 4-bit indices stand for

  // Blocks whose scales and minima are multiples of common factors; 0 for types without super-blocks.
  int factor_blocks() const { return width == 256 ? width / block : 0; }
};

// Throws if the type is unknown.
RowTraits traits_of(RowType type);

// A quantized row: value = scale * (quantized value) + minimum, with a scale and a minimum per 16 values.
struct CodedRow {
  std::vector<int8_t> codes;
  std::vector<float> scales, minima;               // per 16 values
  std::vector<uint16_t> half_scales, half_minima;  // the file's bits, for formats with float16 scales
  // For types with super-blocks: integers per 16 values, and factors per 256 values, whose products are the scales and
  // minima. A minimum's factor has the opposite sign of the file's.
  std::vector<int8_t> scale_codes, minimum_codes;
  std::vector<uint16_t> scale_factors, minimum_factors;

  explicit CodedRow(int cols)
      : codes(size_t(cols)),
        scales(size_t(cols) / 16),
        minima(size_t(cols) / 16),
        half_scales(size_t(cols) / 16),
        half_minima(size_t(cols) / 16),
        scale_codes(size_t(cols) / 16),
        minimum_codes(size_t(cols) / 16),
        scale_factors(size_t(cols) / 256),
        minimum_factors(size_t(cols) / 256) {}
};

// Decodes a row of a quantized type.
void decode_row(RowType type, const uint8_t* data, int cols, CodedRow& row);

}  // namespace kvferry
