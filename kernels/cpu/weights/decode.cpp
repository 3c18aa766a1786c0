#include "weights/decode.hpp"

#include <cstring>
#include <stdexcept>

#include "simd/vec_portable.hpp"

namespace kvferry {
namespace {

// IQ4_NL.
constexpr int8_t kUnevenCodes[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
// Twice the values of e2m1 (Rouhani et al., Microscaling Data Formats for Deep Learning, 2023, section 4).
constexpr int8_t kTwiceE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

}  // namespace

RowTraits traits_of(RowType type) {
  switch (type) {
    case RowType::f32: return {1, 4, 0, false, false, false, 0};
    case RowType::f16: return {1, 2, 0, false, false, false, 0};
    case RowType::bf16: return {1, 2, 0, false, false, false, 0};
    case RowType::q4_0: return {32, 18, 32, false, true, false, -8};
    case RowType::q4_1: return {32, 20, 32, false, true, true, 0};
    case RowType::q5_0: return {32, 22, 32, true, true, false, 0};
    case RowType::q5_1: return {32, 24, 32, true, true, true, 0};
    case RowType::q8_0: return {32, 34, 32, true, true, false, 0};
    case RowType::q2_k: return {256, 84, 16, true, false, true, 0};
    case RowType::q3_k: return {256, 110, 16, true, false, false, 0};
    case RowType::q4_k: return {256, 144, 32, false, false, true, 0};
    case RowType::q5_k: return {256, 176, 32, true, false, true, 0};
    case RowType::q6_k: return {256, 210, 16, true, false, false, 0};
    case RowType::iq4_nl: return {32, 18, 32, true, true, false, 0, kUnevenCodes};
    case RowType::wide4: return {32, 24, 32, false, false, true, 0};
    case RowType::wide8: return {32, 36, 32, true, false, false, 0};
    case RowType::e2m1: return {32, 18, 32, true, true, false, 0, kTwiceE2m1};
    case RowType::wide_e2m1: return {32, 20, 32, true, false, false, 0, kTwiceE2m1};
    case RowType::as_f16:
    case RowType::as_bf16: return {1, 4, 0, false, false, false, 0};
  }
  throw std::invalid_argument("unknown weight type");
}

namespace {

uint16_t half_bits(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}

float half_at(const uint8_t* p) { return portable::half_to_float(half_bits(p)); }

void unpack_scale_pair(int i, const uint8_t* s, int& scale, int& minimum) {
  if (i < 4) {
    scale = s[i] & 63;
    minimum = s[i + 4] & 63;
  } else {
    scale = (s[i + 4] & 15) | (s[i - 4] >> 6 << 4);
    minimum = (s[i + 4] >> 4) | (s[i] >> 6 << 4);
  }
}

// Decodes a block of 32 values with a scale and an optional minimum, both float16 or both float32.
void decode_block(RowType type, const uint8_t* b, int at, CodedRow& row) {
  const RowTraits t = traits_of(type);
  const uint8_t* p = b;
  uint16_t half_scale = 0, half_minimum = 0;
  float scale, minimum = 0.0f;
  const auto take = [&p](auto& to) {
    std::memcpy(&to, p, sizeof to);
    p += sizeof to;
  };
  if (t.half_scales) {
    take(half_scale);
    if (t.has_min) take(half_minimum);
    scale = portable::half_to_float(half_scale);
    minimum = portable::half_to_float(half_minimum);
  } else {
    take(scale);
    if (t.has_min) take(minimum);
  }
  for (int half = 0; half < 2; ++half) {
    const size_t i = size_t(at) / 16 + half;
    row.half_scales[i] = half_scale;
    row.half_minima[i] = half_minimum;
    row.scales[i] = scale;
    row.minima[i] = minimum;
  }
  int8_t* codes = row.codes.data() + at;
  if (type == RowType::q8_0 || type == RowType::wide8) {
    std::memcpy(codes, p, 32);
    return;
  }
  uint32_t fifth = 0;
  if (type == RowType::q5_0 || type == RowType::q5_1) {
    std::memcpy(&fifth, p, 4);
    p += 4;
  }
  for (int i = 0; i < 16; ++i) {
    codes[i] = int8_t((p[i] & 15) | (fifth >> i & 1) << 4);
    codes[i + 16] = int8_t((p[i] >> 4) | (fifth >> (i + 16) & 1) << 4);
  }
  if (type == RowType::q5_0)
    for (int i = 0; i < 32; ++i) codes[i] = int8_t(codes[i] - 16);
  if (t.table)
    for (int i = 0; i < 32; ++i) codes[i] = t.table[codes[i]];
}

// Sets the factors of a super-block of 256 values, the file's float16 numbers at `d` and `least`, and multiplies its
// integers by them.
void scale_super_block(const uint8_t* d, const uint8_t* least, int at, CodedRow& row) {
  row.scale_factors[size_t(at) / 256] = half_bits(d);
  row.minimum_factors[size_t(at) / 256] = least ? uint16_t(half_bits(least) ^ 0x8000) : 0;
  for (size_t i = size_t(at) / 16; i < size_t(at) / 16 + 16; ++i) {
    row.scales[i] = half_at(d) * float(row.scale_codes[i]);
    row.minima[i] = least ? -half_at(least) * float(row.minimum_codes[i]) : 0.0f;
  }
}

// K-quants: super-blocks of 256 values.
void decode_super_block(RowType type, const uint8_t* b, int at, CodedRow& row) {
  int8_t* codes = row.codes.data() + at;
  int8_t* scales = row.scale_codes.data() + at / 16;
  int8_t* minima = row.minimum_codes.data() + at / 16;
  if (type == RowType::q4_k || type == RowType::q5_k) {
    const uint8_t* high = b + 16;
    const uint8_t* low = type == RowType::q5_k ? b + 48 : b + 16;
    for (int i = 0; i < 8; ++i) {
      int scale, minimum;
      unpack_scale_pair(i, b + 4, scale, minimum);
      for (int half = 0; half < 2; ++half) {
        scales[2 * i + half] = int8_t(scale);
        minima[2 * i + half] = int8_t(minimum);
      }
      for (int l = 0; l < 32; ++l) {
        const uint8_t byte = low[(i / 2) * 32 + l];
        int code = i % 2 ? byte >> 4 : byte & 15;
        if (type == RowType::q5_k) code |= (high[l] >> i & 1) << 4;
        codes[i * 32 + l] = int8_t(code);
      }
    }
    scale_super_block(b, b + 2, at, row);
  } else if (type == RowType::q6_k) {
    for (int n = 0; n < 2; ++n) {
      const uint8_t *low = b + n * 64, *high = b + 128 + n * 32;
      for (int l = 0; l < 32; ++l) {
        codes[n * 128 + l] = int8_t(((low[l] & 15) | (high[l] & 3) << 4) - 32);
        codes[n * 128 + l + 32] = int8_t(((low[l + 32] & 15) | (high[l] >> 2 & 3) << 4) - 32);
        codes[n * 128 + l + 64] = int8_t(((low[l] >> 4) | (high[l] >> 4 & 3) << 4) - 32);
        codes[n * 128 + l + 96] = int8_t(((low[l + 32] >> 4) | (high[l] >> 6 & 3) << 4) - 32);
      }
    }
    std::memcpy(scales, b + 192, 16);
    scale_super_block(b + 208, nullptr, at, row);
  } else if (type == RowType::q2_k) {
    for (int i = 0; i < 16; ++i) {
      scales[i] = int8_t(b[i] & 15);
      minima[i] = int8_t(b[i] >> 4);
    }
    scale_super_block(b + 80, b + 82, at, row);
    for (int n = 0; n < 2; ++n)
      for (int j = 0; j < 4; ++j)
        for (int l = 0; l < 32; ++l) codes[n * 128 + j * 32 + l] = int8_t(b[16 + n * 32 + l] >> (2 * j) & 3);
  } else {  // q3_k
    const uint8_t *mask = b, *low = b + 32, *s = b + 96;
    for (int i = 0; i < 16; ++i) {
      const int lower = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
      const int upper = s[8 + i % 4] >> (2 * (i / 4)) & 3;
      scales[i] = int8_t((lower | upper << 4) - 32);
    }
    scale_super_block(b + 108, nullptr, at, row);
    for (int n = 0; n < 2; ++n)
      for (int j = 0; j < 4; ++j)
        for (int l = 0; l < 32; ++l) {
          const int two = low[n * 32 + l] >> (2 * j) & 3;
          codes[n * 128 + j * 32 + l] = int8_t(two - (mask[l] >> (n * 4 + j) & 1 ? 0 : 4));
        }
  }
}

}  // namespace

void decode_row(RowType type, const uint8_t* data, int cols, CodedRow& row) {
  const RowTraits t = traits_of(type);
  for (int at = 0; at < cols; at += t.width, data += t.bytes) {
    if (t.width == 32) {
      decode_block(type, data, at, row);
    } else {
      decode_super_block(type, data, at, row);
    }
  }
}

size_t row_bytes(RowType type, int cols) {
  const RowTraits t = traits_of(type);
  return cols % t.width ? 0 : size_t(cols / t.width) * size_t(t.bytes);
}

void dequantize_row(RowType type, const uint8_t* data, int cols, float* out) {
  switch (type) {
    case RowType::f32:
    case RowType::as_f16:
    case RowType::as_bf16: std::memcpy(out, data, size_t(cols) * 4); return;
    case RowType::f16:
      for (int k = 0; k < cols; ++k) out[k] = half_at(data + 2 * k);
      return;
    case RowType::bf16:
      for (int k = 0; k < cols; ++k) {
        uint16_t bits;
        std::memcpy(&bits, data + 2 * k, 2);
        const uint32_t wide = uint32_t(bits) << 16;
        std::memcpy(out + k, &wide, 4);
      }
      return;
    default: break;
  }
  CodedRow row(cols);
  decode_row(type, data, cols, row);
  const float offset = traits_of(type).offset;
  for (int k = 0; k < cols; ++k)
    out[k] = row.scales[size_t(k) / 16] * (float(row.codes[size_t(k)]) + offset) + row.minima[size_t(k) / 16];
}

}  // namespace kvferry
