// Weights as files hold them, to packed matrices.
//
// A packed matrix is a row of panels, each of 16 outputs with all their inputs (padded to 32 with zeros):
//
//   f32, f16   [input][16 outputs]
//   bf16       [input / 2][16 outputs][2 inputs]
//   codes4     per block: [8 inputs][16 outputs][2 words of 4 bits x 4], scales [16], minima [16]
//   codes8     per block: [input / 2][16 outputs][2 inputs], scales [16], minima [16]
//
// In a group of 8 inputs of codes4, input 2 p + j of output o is nibble `nibble_of_pair(p)` of 16-bit word 2 o + j:
// shifted, each word pair holds two neighbouring inputs, as the products of pairs want them; masked, it holds four, in
// the order 0 2 1 3, as the products of bytes want them.
// Block formats: the ggml project's ggml-common.h. Codes, scales and minima are kept as shipped, not rounded again.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "model.hpp"

namespace kvferry {

// GGUF's numbers of types.
enum class Source : int {
  f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q5_0 = 6, q5_1 = 7, q8_0 = 8, q2_k = 10, q3_k = 11, q4_k = 12, q5_k = 13,
  q6_k = 14, bf16 = 30
};

// Bytes of one row of `cols` values, or 0 where the type is unknown or does not divide.
size_t row_bytes(Source type, int cols);

// The packed form for rows of these types: as shipped where all agree; codes of different kinds as 8-bit codes with
// float32 scales; floats of different kinds as f32. `wanted`: "shipped", "f32", "f16" or "bf16".
Matrix describe(const std::string& wanted, const std::vector<Source>& types, int rows, int cols);

struct Part {
  Source type;
  const uint8_t* data;  // [rows][row_bytes]
  int rows;
};

// Packs panel by panel. `order[r]` is the row, counted over all parts, that stands at row r; -1: zeros.
void pack(const Matrix& matrix, const std::vector<Part>& parts, const int64_t* order, uint8_t* out);

// One row of a file's blocks as floats.
void dequantize_row(Source type, const uint8_t* data, int cols, float* out);

}  // namespace kvferry
