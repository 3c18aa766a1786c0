// Inputs of matrix products: rows of activations in the representations that the products read.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"

namespace kvferry {

constexpr float kLowWordSteps = 65534.0f;  // resolution of a low word: fractions of the quantization step

// Set of stored representations. Integer representations are quantized from f32 and have their own sums. If both
// `bytes` and `words` are set, the words hold the same integers as the bytes. `low_words` hold the rounding error of
// the words as a second int16.
struct InputForms {
  bool f32 = false, bf16 = false, sums = false, bytes = false, words = false, low_words = false;

  bool are_quantized() const { return bytes || words; }
  InputForms operator|(InputForms other) const {
    return {f32 || other.f32,     bf16 || other.bf16,   sums || other.sums,
            bytes || other.bytes, words || other.words, low_words || other.low_words};
  }
};

struct Rows {
  InputForms forms;
  float* f32 = nullptr;      // [rows][stride]; only scratch memory if f32 is not a stored form
  uint16_t* bf16 = nullptr;  // [rows][stride] bfloat16
  // Sums of 16 and of 32 adjacent inputs, in the representation that products read; they are multiplied by the minima
  // of quantized matrices.
  float* half_sums = nullptr;   // [rows][stride / kSumWidth]
  float* group_sums = nullptr;  // [rows][stride / kGroup]
  // Inputs quantized to 8 bits, or to 16 bits if `bytes` is not set: value = scale * byte, or scale * (word + low_word
  // / kLowWordSteps). Bytes are stored in quads of four inputs in the order 0 2 1 3.
  int8_t* bytes = nullptr;       // [rows][stride]
  int16_t* words = nullptr;      // [rows][stride]
  int16_t* low_words = nullptr;  // [rows][stride]
  float* scales = nullptr;       // [rows][stride / kGroup]
  int32_t* byte_sums = nullptr;  // [rows][stride / kSumWidth]; only with bytes
  int stride = 0;                // a multiple of kGroup

  Rows from(int row) const {
    Rows r = *this;
    const size_t inputs = size_t(row) * stride;
    r.f32 += inputs;
    r.bf16 += inputs;
    r.half_sums += inputs / kSumWidth;
    r.group_sums += inputs / kGroup;
    if (forms.are_quantized()) r.scales += inputs / kGroup;
    if (forms.words) r.words += inputs;
    if (forms.low_words) r.low_words += inputs;
    if (forms.bytes) {
      r.bytes += inputs;
      r.byte_sums += inputs / kSumWidth;
    }
    return r;
  }

  // The same rows from input `first` on, a multiple of kGroup.
  Rows columns_from(int first) const {
    Rows r = *this;
    r.f32 += first;
    r.bf16 += first;
    r.half_sums += first / kSumWidth;
    r.group_sums += first / kGroup;
    if (forms.are_quantized()) r.scales += first / kGroup;
    if (forms.words) r.words += first;
    if (forms.low_words) r.low_words += first;
    if (forms.bytes) {
      r.bytes += first;
      r.byte_sums += first / kSumWidth;
    }
    return r;
  }

  static size_t memory_bytes(int rows, int stride, InputForms forms) {
    const size_t inputs = size_t(rows) * stride;
    const size_t sums = (inputs / kSumWidth + inputs / kGroup) * 4;
    return inputs * 6 + sums + (forms.are_quantized() ? sums : 0) + (forms.words ? inputs * 2 : 0) +
           (forms.low_words ? inputs * 2 : 0) + (forms.bytes ? inputs : 0);
  }

  // Lays out the arrays in `memory`, which must have at least `memory_bytes` bytes.
  static Rows over(uint8_t* memory, int rows, int stride, InputForms forms) {
    const size_t inputs = size_t(rows) * stride;
    const auto take = [&memory](size_t bytes) {
      uint8_t* at = memory;
      memory += bytes;
      return at;
    };
    Rows r;
    r.forms = forms;
    r.stride = stride;
    r.f32 = reinterpret_cast<float*>(take(inputs * 4));
    r.bf16 = reinterpret_cast<uint16_t*>(take(inputs * 2));
    r.half_sums = reinterpret_cast<float*>(take(inputs / kSumWidth * 4));
    r.group_sums = reinterpret_cast<float*>(take(inputs / kGroup * 4));
    if (forms.are_quantized()) r.scales = reinterpret_cast<float*>(take(inputs / kGroup * 4));
    if (forms.words) r.words = reinterpret_cast<int16_t*>(take(inputs * 2));
    if (forms.low_words) r.low_words = reinterpret_cast<int16_t*>(take(inputs * 2));
    if (forms.bytes) {
      r.byte_sums = reinterpret_cast<int32_t*>(take(inputs / kSumWidth * 4));
      r.bytes = reinterpret_cast<int8_t*>(take(inputs));
    }
    return r;
  }
};

}  // namespace kvferry
