// Inputs of products: rows of activations in the forms that their products read, filled together.
#pragma once
#include <cstddef>
#include <cstdint>

#include "model.hpp"

namespace kvferry {

constexpr float kRests = 65534.0f;  // steps of a rest in one of a word

// Which forms are kept. Whole numbers are made out of wide, and bring sums of their own; where there are bytes, words hold
// the same numbers. `rests`: what words leave, as words of their own.
struct Forms {
  bool wide = false, narrow = false, sums = false, bytes = false, words = false, rests = false;

  bool are_whole() const { return bytes || words; }
  Forms operator|(Forms other) const {
    return {wide || other.wide, narrow || other.narrow, sums || other.sums, bytes || other.bytes, words || other.words, rests || other.rests};
  }
};

struct Rows {
  Forms forms;
  float* wide = nullptr;       // [rows][stride]; scratch where it is not kept
  uint16_t* narrow = nullptr;  // [rows][stride] bfloat16
  // Sums of what a matrix of codes multiplies: of 16 neighbours, and of 32.
  float* half_sums = nullptr;   // [rows][stride / kSumWidth]
  float* group_sums = nullptr;  // [rows][stride / kGroup]
  // Rounded to 8 bits, or to 16 without bytes: value = step * byte, or step * (word + rest / kRests). Bytes are quads of four
  // inputs in the order 0 2 1 3.
  int8_t* bytes = nullptr;       // [rows][stride]
  int16_t* words = nullptr;      // [rows][stride]
  int16_t* rests = nullptr;      // [rows][stride]
  float* steps = nullptr;        // [rows][stride / kGroup]
  int32_t* byte_sums = nullptr;  // [rows][stride / kSumWidth]; with bytes only
  int stride = 0;                // a multiple of kGroup

  Rows from(int row) const {
    Rows r = *this;
    const size_t inputs = size_t(row) * stride;
    r.wide += inputs;
    r.narrow += inputs;
    r.half_sums += inputs / kSumWidth;
    r.group_sums += inputs / kGroup;
    if (forms.are_whole()) r.steps += inputs / kGroup;
    if (forms.words) r.words += inputs;
    if (forms.rests) r.rests += inputs;
    if (forms.bytes) {
      r.bytes += inputs;
      r.byte_sums += inputs / kSumWidth;
    }
    return r;
  }

  static size_t memory_of(int rows, int stride, Forms forms) {
    const size_t inputs = size_t(rows) * stride;
    const size_t sums = (inputs / kSumWidth + inputs / kGroup) * 4;
    return inputs * 6 + sums + (forms.are_whole() ? sums : 0) + (forms.words ? inputs * 2 : 0) + (forms.rests ? inputs * 2 : 0) + (forms.bytes ? inputs : 0);
  }

  // Laid out over as much memory as `memory_of` says.
  static Rows over(uint8_t* memory, int rows, int stride, Forms forms) {
    const size_t inputs = size_t(rows) * stride;
    const auto take = [&memory](size_t bytes) {
      uint8_t* at = memory;
      memory += bytes;
      return at;
    };
    Rows r;
    r.forms = forms;
    r.stride = stride;
    r.wide = reinterpret_cast<float*>(take(inputs * 4));
    r.narrow = reinterpret_cast<uint16_t*>(take(inputs * 2));
    r.half_sums = reinterpret_cast<float*>(take(inputs / kSumWidth * 4));
    r.group_sums = reinterpret_cast<float*>(take(inputs / kGroup * 4));
    if (forms.are_whole()) r.steps = reinterpret_cast<float*>(take(inputs / kGroup * 4));
    if (forms.words) r.words = reinterpret_cast<int16_t*>(take(inputs * 2));
    if (forms.rests) r.rests = reinterpret_cast<int16_t*>(take(inputs * 2));
    if (forms.bytes) {
      r.byte_sums = reinterpret_cast<int32_t*>(take(inputs / kSumWidth * 4));
      r.bytes = reinterpret_cast<int8_t*>(take(inputs));
    }
    return r;
  }
};

}  // namespace kvferry
