// Conversion of weights from file formats to packed matrices.
//
// A packed matrix is a sequence of panels. A panel holds 16 outputs with all their inputs, padded with zeros to a
// multiple of 32:
//
//   f32, f16   [input][16 outputs]
//   bf16       [input / 2][16 outputs][2 inputs]
//   codes4     per block: [8 inputs][16 outputs][2 words of 4 bits x 4], scales [16], minima [16]
//   codes8     per block: [input / 2][16 outputs][2 inputs], scales [16], minima [16]
//   table4     as codes4, with indices into a table of 16 int8 values, and no minima
//   codes6     per block: [16 inputs][3][16 outputs][2 words], scales [16], minima [16]
//
// In a group of 8 inputs of codes4, input 2 p + j of output o is nibble `nibble_of_pair(p)` of 16-bit word 2 o + j. A
// shift and a mask of 4 bits extract two adjacent inputs, as bf16 and int16 dot products read them; a mask of every
// other nibble extracts four inputs in the order 0 2 1 3, as int8 dot products read them. In a group of 16 inputs of
// codes6, input 2 p + j of output o is in the lower 6 bits of byte p % 2 of word 2 o + j of vector p / 2 for p < 6.
// Of pairs 6 and 7, the upper two bits of that byte in the three vectors hold bits 0 and 1, 2 and 3, and 4 and 5. So
// six pairs need a permutation and at most one shift, and a mask extracts four inputs. With super-blocks, float16
// factors of the scales [16] and of the minima [16] precede their blocks, whose scales and minima are 8-bit integers.
// The block formats are defined in ggml-common.h of the ggml project. Quantized values, scales and minima are copied
// bit for bit; nothing is requantized.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "data/matrix.hpp"

namespace kvferry {

// Row types, with GGUF's type ids. From 1000 on: types for checkpoints of other formats, whose values no GGUF type
// can represent. Their blocks of 32 consist of a float32 scale, for wide4 a float32 minimum, and quantized values as
// in q4_1 or q8_0. as_f16 and as_bf16 are float32 rows that "shipped" rounds to 16 bits. e2m1 has indices of e2m1
// numbers, in the order of q4_0, and half of their scale as a float16, wide_e2m1 as a float32.
enum class RowType : int {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  iq4_nl = 20,
  bf16 = 30,
  wide4 = 1000,
  wide8 = 1001,
  as_f16 = 1002,
  as_bf16 = 1003,
  e2m1 = 1004,
  wide_e2m1 = 1005
};

// Bytes of a row of `cols` values; 0 if `cols` is not a multiple of the type's block.
size_t row_bytes(RowType type, int cols);

// Returns the packed format for rows of these types. `wanted` is "shipped", "f32", "f16" or "bf16". "shipped" keeps a
// common type. With mixed types, formats with the same table keep their indices, with float32 scales; K-quants get
// 6-bit values with their own factors; 4-bit formats get 4-bit values with float32 scales and minima, other quantized
// formats 8-bit values with float32 scales, and all others become f32. `data` is null.
Matrix packed_layout(const std::string& wanted, const std::vector<RowType>& types, int rows, int cols);

struct Part {
  RowType type;
  const uint8_t* data;  // [rows][row_bytes]
  int rows;
};

// Packs panel by panel. Output row r is source row `order[r]`, counted over all parts; -1 gives a row of zeros.
void pack(const Matrix& matrix, const std::vector<Part>& parts, const int64_t* order, uint8_t* out);

// Returns whether each output has one scale for all its blocks (`has_one_scale`); the matrix must have data, and all
// its scales are read.
bool has_one_scale(const Matrix& matrix);

// Dequantizes a row of weights in a file's format.
void dequantize_row(RowType type, const uint8_t* data, int cols, float* out);

}  // namespace kvferry
