#include "weights/pack.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "simd/vec_portable.hpp"

namespace kvferry {
namespace {

struct Traits {
  int width;       // values per stored block
  int bytes;       // bytes per stored block
  int block;       // values per scale; 0: not quantized
  bool wide_code;  // codes need 8 bits
  bool half_scales, has_min;
  float offset;  // added to every code, if it is the same for all codes
};

Traits traits_of(GgufType type) {
  switch (type) {
    case GgufType::f32: return {1, 4, 0, false, false, false, 0};
    case GgufType::f16: return {1, 2, 0, false, false, false, 0};
    case GgufType::bf16: return {1, 2, 0, false, false, false, 0};
    case GgufType::q4_0: return {32, 18, 32, false, true, false, -8};
    case GgufType::q4_1: return {32, 20, 32, false, true, true, 0};
    case GgufType::q5_0: return {32, 22, 32, true, true, false, 0};
    case GgufType::q5_1: return {32, 24, 32, true, true, true, 0};
    case GgufType::q8_0: return {32, 34, 32, true, true, false, 0};
    case GgufType::q2_k: return {256, 84, 16, true, false, true, 0};
    case GgufType::q3_k: return {256, 110, 16, true, false, false, 0};
    case GgufType::q4_k: return {256, 144, 32, false, false, true, 0};
    case GgufType::q5_k: return {256, 176, 32, true, false, true, 0};
    case GgufType::q6_k: return {256, 210, 16, true, false, false, 0};
  }
  throw std::invalid_argument("unknown type of weights");
}

float half_at(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return portable::half_to_float(h);
}

uint16_t float_to_half(float x) {  // round to nearest even; inputs are exact halves, or the caller checks the range
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits >= 0x7f800000) return uint16_t(sign | 0x7c00 | (bits > 0x7f800000 ? 0x200 : 0));
  if (bits >= 0x477ff000) return uint16_t(sign | 0x7c00);
  if (bits < 0x38800000) {
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;  // aligns the unit of the smallest subnormal half with the lowest mantissa bit
    std::memcpy(&bits, &magnitude, 4);
    return uint16_t(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return uint16_t(sign | ((bits - 0x38000000) >> 13));
}

uint16_t float_to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// A quantized row: value = scale * code + minimum, with a scale and a minimum per 16 values.
struct CodedRow {
  std::vector<int8_t> codes;
  std::vector<float> scales, minima;               // per 16 values
  std::vector<uint16_t> half_scales, half_minima;  // bits of the file, for formats with float16 scales

  explicit CodedRow(int cols)
      : codes(size_t(cols)),
        scales(size_t(cols) / 16),
        minima(size_t(cols) / 16),
        half_scales(size_t(cols) / 16),
        half_minima(size_t(cols) / 16) {}
};

void unpack_scale_pair(int i, const uint8_t* s, int& scale, int& minimum) {
  if (i < 4) {
    scale = s[i] & 63;
    minimum = s[i + 4] & 63;
  } else {
    scale = (s[i + 4] & 15) | (s[i - 4] >> 6 << 4);
    minimum = (s[i + 4] >> 4) | (s[i] >> 6 << 4);
  }
}

// Blocks of 32 values with a float16 scale and an optional float16 minimum.
void decode_block(GgufType type, const uint8_t* b, int at, CodedRow& row) {
  const Traits t = traits_of(type);
  uint16_t scale, minimum = 0;
  std::memcpy(&scale, b, 2);
  const uint8_t* p = b + 2;
  if (t.has_min) {
    std::memcpy(&minimum, p, 2);
    p += 2;
  }
  for (int half = 0; half < 2; ++half) {
    const size_t i = size_t(at) / 16 + half;
    row.half_scales[i] = scale;
    row.half_minima[i] = minimum;
    row.scales[i] = portable::half_to_float(scale);
    row.minima[i] = portable::half_to_float(minimum);
  }
  int8_t* codes = row.codes.data() + at;
  if (type == GgufType::q8_0) {
    std::memcpy(codes, p, 32);
    return;
  }
  uint32_t fifth = 0;
  if (type == GgufType::q5_0 || type == GgufType::q5_1) {
    std::memcpy(&fifth, p, 4);
    p += 4;
  }
  for (int i = 0; i < 16; ++i) {
    codes[i] = int8_t((p[i] & 15) | (fifth >> i & 1) << 4);
    codes[i + 16] = int8_t((p[i] >> 4) | (fifth >> (i + 16) & 1) << 4);
  }
  if (type == GgufType::q5_0)
    for (int i = 0; i < 32; ++i) codes[i] = int8_t(codes[i] - 16);
}

// K-quants: super-blocks of 256 values.
void decode_super_block(GgufType type, const uint8_t* b, int at, CodedRow& row) {
  int8_t* codes = row.codes.data() + at;
  float* scales = row.scales.data() + at / 16;
  float* minima = row.minima.data() + at / 16;
  if (type == GgufType::q4_k || type == GgufType::q5_k) {
    const float d = half_at(b), least = half_at(b + 2);
    const uint8_t* high = b + 16;
    const uint8_t* low = type == GgufType::q5_k ? b + 48 : b + 16;
    for (int i = 0; i < 8; ++i) {
      int scale, minimum;
      unpack_scale_pair(i, b + 4, scale, minimum);
      for (int half = 0; half < 2; ++half) {
        scales[2 * i + half] = d * float(scale);
        minima[2 * i + half] = -(least * float(minimum));
      }
      for (int l = 0; l < 32; ++l) {
        const uint8_t byte = low[(i / 2) * 32 + l];
        int code = i % 2 ? byte >> 4 : byte & 15;
        if (type == GgufType::q5_k) code |= (high[l] >> i & 1) << 4;
        codes[i * 32 + l] = int8_t(code);
      }
    }
  } else if (type == GgufType::q6_k) {
    const float d = half_at(b + 208);
    const int8_t* sc = reinterpret_cast<const int8_t*>(b + 192);
    for (int n = 0; n < 2; ++n) {
      const uint8_t *low = b + n * 64, *high = b + 128 + n * 32;
      for (int l = 0; l < 32; ++l) {
        codes[n * 128 + l] = int8_t(((low[l] & 15) | (high[l] & 3) << 4) - 32);
        codes[n * 128 + l + 32] = int8_t(((low[l + 32] & 15) | (high[l] >> 2 & 3) << 4) - 32);
        codes[n * 128 + l + 64] = int8_t(((low[l] >> 4) | (high[l] >> 4 & 3) << 4) - 32);
        codes[n * 128 + l + 96] = int8_t(((low[l + 32] >> 4) | (high[l] >> 6 & 3) << 4) - 32);
      }
    }
    for (int i = 0; i < 16; ++i) {
      scales[i] = d * float(sc[i]);
      minima[i] = 0.0f;
    }
  } else if (type == GgufType::q2_k) {
    const float d = half_at(b + 80), least = half_at(b + 82);
    for (int i = 0; i < 16; ++i) {
      scales[i] = d * float(b[i] & 15);
      minima[i] = -(least * float(b[i] >> 4));
    }
    for (int n = 0; n < 2; ++n)
      for (int j = 0; j < 4; ++j)
        for (int l = 0; l < 32; ++l) codes[n * 128 + j * 32 + l] = int8_t(b[16 + n * 32 + l] >> (2 * j) & 3);
  } else {  // q3_k
    const float d = half_at(b + 108);
    const uint8_t *mask = b, *low = b + 32, *s = b + 96;
    for (int i = 0; i < 16; ++i) {
      const int lower = i < 8 ? s[i] & 15 : s[i - 8] >> 4;
      const int upper = s[8 + i % 4] >> (2 * (i / 4)) & 3;
      scales[i] = d * float((lower | upper << 4) - 32);
      minima[i] = 0.0f;
    }
    for (int n = 0; n < 2; ++n)
      for (int j = 0; j < 4; ++j)
        for (int l = 0; l < 32; ++l) {
          const int two = low[n * 32 + l] >> (2 * j) & 3;
          codes[n * 128 + j * 32 + l] = int8_t(two - (mask[l] >> (n * 4 + j) & 1 ? 0 : 4));
        }
  }
}

void decode_row(GgufType type, const uint8_t* data, int cols, CodedRow& row) {
  const Traits t = traits_of(type);
  for (int at = 0; at < cols; at += t.width, data += t.bytes) {
    if (t.width == 32) {
      decode_block(type, data, at, row);
    } else {
      decode_super_block(type, data, at, row);
    }
  }
}

[[noreturn]] void throw_not_finite() { throw std::overflow_error("values that are not finite in the packed form"); }

void pack_float_panel(const Matrix& m, const std::vector<std::vector<float>>& rows, uint8_t* out) {
  for (int k = 0; k < m.depth; ++k)
    for (int o = 0; o < kPanel; ++o) {
      const float value = k < m.cols && !rows[size_t(o)].empty() ? rows[size_t(o)][size_t(k)] : 0.0f;
      if (!std::isfinite(value)) throw_not_finite();
      if (m.format == Format::f32) {
        std::memcpy(out + (size_t(k) * kPanel + o) * 4, &value, 4);
      } else if (m.format == Format::f16) {
        const uint16_t bits = float_to_half(value);
        if ((bits & 0x7c00) == 0x7c00) throw_not_finite();
        std::memcpy(out + (size_t(k) * kPanel + o) * 2, &bits, 2);
      } else {
        const uint16_t bits = float_to_bf16(value);
        if ((bits & 0x7f80) == 0x7f80) throw_not_finite();
        std::memcpy(out + (size_t(k / 2) * 32 + o * 2 + k % 2) * 2, &bits, 2);
      }
    }
}

void pack_code_lane(const Matrix& m, const CodedRow& row, int lane, int shift, uint8_t* out) {
  for (int b = 0; b < m.depth / m.block; ++b, out += m.block_bytes()) {
    const int8_t* codes = row.codes.data() + b * m.block;
    if (m.format == Format::codes4) {
      for (int g = 0; g < m.block / 8; ++g)
        for (int j = 0; j < 2; ++j) {
          uint16_t word = 0;
          for (int i = 0; i < 4; ++i)
            word = uint16_t(word | (codes[g * 8 + 2 * i + j] & 15) << (4 * nibble_of_pair(i)));
          std::memcpy(out + g * 64 + (lane * 2 + j) * 2, &word, 2);
        }
    } else {
      for (int k = 0; k < m.block; ++k) out[(k / 2) * 32 + lane * 2 + k % 2] = uint8_t(codes[k] + shift);
    }
    uint8_t* scales = out + m.code_bytes();
    uint8_t* minima = scales + m.scale_bytes();
    const size_t i = size_t(b) * m.block / 16;
    if (m.half_scales) {
      std::memcpy(scales + lane * 2, &row.half_scales[i], 2);
      if (m.has_min) std::memcpy(minima + lane * 2, &row.half_minima[i], 2);
    } else {
      std::memcpy(scales + lane * 4, &row.scales[i], 4);
      if (m.has_min) std::memcpy(minima + lane * 4, &row.minima[i], 4);
    }
  }
}

}  // namespace

size_t row_bytes(GgufType type, int cols) {
  const Traits t = traits_of(type);
  return cols % t.width ? 0 : size_t(cols / t.width) * size_t(t.bytes);
}

void dequantize_row(GgufType type, const uint8_t* data, int cols, float* out) {
  switch (type) {
    case GgufType::f32: std::memcpy(out, data, size_t(cols) * 4); return;
    case GgufType::f16:
      for (int k = 0; k < cols; ++k) out[k] = half_at(data + 2 * k);
      return;
    case GgufType::bf16:
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

Matrix packed_layout(const std::string& wanted, const std::vector<GgufType>& types, int rows, int cols) {
  Matrix m;
  m.rows = rows;
  m.cols = cols;
  m.panels = (rows + kPanel - 1) / kPanel;
  m.depth = (cols + kGroup - 1) / kGroup * kGroup;
  const auto is_float = [](GgufType t) { return traits_of(t).block == 0; };
  const bool all_same = std::all_of(types.begin(), types.end(), [&](GgufType t) { return t == types[0]; });
  if (wanted == "shipped" && std::none_of(types.begin(), types.end(), is_float)) {
    Traits t = traits_of(types[0]);
    if (!all_same) {
      t = {0, 0, 32, true, false, false, 0};
      for (GgufType type : types) {
        t.block = std::min(t.block, traits_of(type).block);
        t.has_min = t.has_min || traits_of(type).has_min;
      }
    }
    m.format = t.wide_code ? Format::codes8 : Format::codes4;
    m.block = t.block;
    m.half_scales = t.half_scales;
    m.has_min = t.has_min;
    m.offset = t.offset;
    m.panel_bytes = size_t(m.depth / m.block) * size_t(m.block_bytes());
    return m;
  }
  if (wanted == "shipped") {
    m.format = !all_same || types[0] == GgufType::f32 ? Format::f32
               : types[0] == GgufType::f16            ? Format::f16
                                                      : Format::bf16;
  } else if (wanted == "f32" || wanted == "f16" || wanted == "bf16") {
    m.format = wanted == "f32" ? Format::f32 : wanted == "f16" ? Format::f16 : Format::bf16;
  } else {
    throw std::invalid_argument("no packed form " + wanted + "; known: shipped, f32, f16, bf16");
  }
  m.panel_bytes = size_t(m.depth) * kPanel * (m.format == Format::f32 ? 4 : 2);
  return m;
}

void pack(const Matrix& m, const std::vector<Part>& parts, const int64_t* order, uint8_t* out) {
  const auto find = [&](int64_t row, const uint8_t*& data) {
    for (const Part& part : parts) {
      if (row < part.rows) {
        data = part.data + size_t(row) * row_bytes(part.type, m.cols);
        return part.type;
      }
      row -= part.rows;
    }
    throw std::out_of_range("a row beyond all parts");
  };
  CodedRow coded(m.has_codes() ? m.cols : 0);
  std::vector<std::vector<float>> floats(kPanel);
  for (int panel = 0; panel < m.panels; ++panel, out += m.panel_bytes) {
    if (m.has_codes()) std::memset(out, 0, m.panel_bytes);
    for (int lane = 0; lane < kPanel; ++lane) {
      const int r = panel * kPanel + lane;
      const int64_t source = r < m.rows ? order[r] : -1;
      const uint8_t* data = nullptr;
      floats[size_t(lane)].clear();
      if (source < 0) continue;
      const GgufType type = find(source, data);
      if (m.has_codes()) {
        decode_row(type, data, m.cols, coded);
        for (size_t i = 0; i < coded.scales.size(); ++i)
          if (!std::isfinite(coded.scales[i]) || !std::isfinite(coded.minima[i])) throw_not_finite();
        // A matrix with mixed formats has no common offset, so offsets are folded into the codes.
        const int shift = m.format == Format::codes8 ? int(traits_of(type).offset) : 0;
        pack_code_lane(m, coded, lane, shift, out);
      } else {
        floats[size_t(lane)].resize(size_t(m.cols));
        dequantize_row(type, data, m.cols, floats[size_t(lane)].data());
      }
    }
    if (!m.has_codes()) pack_float_panel(m, floats, out);
  }
}

}  // namespace kvferry
