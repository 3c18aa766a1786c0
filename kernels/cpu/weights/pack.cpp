#include "weights/pack.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "weights/decode.hpp"

namespace kvferry {
namespace {

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

[[noreturn]] void throw_not_finite() { throw std::overflow_error("values are not finite in the packed format"); }

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

// Returns the index of each int8 value, as a byte, in a table.
std::array<uint8_t, 256> indices_of(const int8_t* table) {
  std::array<uint8_t, 256> found{};
  for (int i = 15; i >= 0; --i) found[uint8_t(table[i])] = uint8_t(i);
  return found;
}

// Adds the values of one output's block to groups of codes6, whose bytes are zero before; see pack.hpp.
void pack_codes6(const int8_t* codes, int block, int lane, uint8_t* out) {
  constexpr int inputs = group_inputs(Format::codes6), bytes = group_bytes(Format::codes6);
  for (int k = 0; k < block; ++k) {
    const int code = codes[k] - kLeast6, pair = k % inputs / 2;
    uint8_t* at = out + k / inputs * bytes + (lane * 2 + k % 2) * 2 + pair % 2;
    if (pair < 6) {
      at[pair / 2 * 64] = uint8_t(at[pair / 2 * 64] | code);
    } else {
      for (int part = 0; part < 3; ++part) at[part * 64] |= uint8_t((code >> (2 * part) & 3) << 6);
    }
  }
}

void pack_code_lane(const Matrix& m, const CodedRow& row, int lane, int shift, uint8_t* out) {
  const bool is_table = m.format == Format::table4;
  const auto indices = is_table ? indices_of(m.table) : std::array<uint8_t, 256>{};
  const auto nibble = [&](int8_t code) { return is_table ? indices[uint8_t(code)] : code & 15; };
  uint8_t* const panel = out;
  for (int b = 0; b < m.depth / m.block; ++b) {
    out = panel + m.block_at(b);
    const int8_t* codes = row.codes.data() + b * m.block;
    if (has_nibbles(m.format)) {
      for (int g = 0; g < m.block / 8; ++g)
        for (int j = 0; j < 2; ++j) {
          uint16_t word = 0;
          for (int i = 0; i < 4; ++i)
            word = uint16_t(word | nibble(codes[g * 8 + 2 * i + j]) << (4 * nibble_of_pair(i)));
          std::memcpy(out + g * 64 + (lane * 2 + j) * 2, &word, 2);
        }
    } else if (m.format == Format::codes6) {
      pack_codes6(codes, m.block, lane, out);
    } else {
      for (int k = 0; k < m.block; ++k) out[(k / 2) * 32 + lane * 2 + k % 2] = uint8_t(codes[k] + shift);
    }
    uint8_t* scales = out + m.code_bytes();
    uint8_t* minima = scales + m.scale_bytes();
    const size_t i = size_t(b) * m.block / 16;
    if (m.factor_blocks) {
      scales[lane] = uint8_t(row.scale_codes[i]);
      if (m.has_min) minima[lane] = uint8_t(row.minimum_codes[i]);
      uint8_t* factors = panel + m.factors_at(b);
      std::memcpy(factors + lane * 2, &row.scale_factors[i / 16], 2);
      if (m.has_min) std::memcpy(factors + 32 + lane * 2, &row.minimum_factors[i / 16], 2);
    } else if (m.half_scales) {
      std::memcpy(scales + lane * 2, &row.half_scales[i], 2);
      if (m.has_min) std::memcpy(minima + lane * 2, &row.half_minima[i], 2);
    } else {
      std::memcpy(scales + lane * 4, &row.scales[i], 4);
      if (m.has_min) std::memcpy(minima + lane * 4, &row.minima[i], 4);
    }
  }
}

// Format of a matrix of one unquantized type.
Format kept_as(RowType type) {
  switch (type) {
    case RowType::f16:
    case RowType::as_f16: return Format::f16;
    case RowType::bf16:
    case RowType::as_bf16: return Format::bf16;
    default: return Format::f32;
  }
}

}  // namespace

Matrix packed_layout(const std::string& wanted, const std::vector<RowType>& types, int rows, int cols) {
  Matrix m;
  m.rows = rows;
  m.cols = cols;
  m.panels = (rows + kPanel - 1) / kPanel;
  m.depth = (cols + kGroup - 1) / kGroup * kGroup;
  const auto is_float = [](RowType t) { return traits_of(t).block == 0; };
  const bool all_same = std::all_of(types.begin(), types.end(), [&](RowType t) { return t == types[0]; });
  if (wanted == "shipped" && std::none_of(types.begin(), types.end(), is_float)) {
    RowTraits t = traits_of(types[0]);
    const int8_t* table = t.table;
    for (RowType type : types)
      if (traits_of(type).table != table) table = nullptr;
    if (!all_same) {
      const bool have_factors =
          std::all_of(types.begin(), types.end(), [](RowType x) { return traits_of(x).factor_blocks(); });
      t = {have_factors ? 256 : 0, 0, 32, false, false, false, 0};
      for (RowType type : types) {
        const RowTraits each = traits_of(type);
        t.block = std::min(t.block, each.block);
        t.wide_code = t.wide_code || each.wide_code;
        t.has_min = t.has_min || each.has_min;
      }
      t.has_min = t.has_min || !t.wide_code;
    }
    m.format = table               ? Format::table4
               : !t.wide_code      ? Format::codes4
               : t.factor_blocks() ? Format::codes6
                                   : Format::codes8;
    if (table) std::copy_n(table, 16, m.table);
    m.block = t.block;
    m.half_scales = t.half_scales;
    m.factor_blocks = t.factor_blocks();
    m.has_min = t.has_min;
    m.offset = t.offset;
    m.panel_bytes = m.bytes_of(m.depth / m.block);
    return m;
  }
  if (wanted == "shipped") {
    m.format = kept_as(types[0]);
    for (RowType type : types)
      if (!is_float(type) || kept_as(type) != m.format) m.format = Format::f32;
  } else if (wanted == "f32" || wanted == "f16" || wanted == "bf16") {
    m.format = wanted == "f32" ? Format::f32 : wanted == "f16" ? Format::f16 : Format::bf16;
  } else {
    throw std::invalid_argument("unknown packed format " + wanted + "; known: shipped, f32, f16, bf16");
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
    throw std::out_of_range("a row is beyond all parts");
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
      const RowType type = find(source, data);
      if (m.has_codes()) {
        decode_row(type, data, m.cols, coded);
        for (size_t i = 0; i < coded.scales.size(); ++i)
          if (!std::isfinite(coded.scales[i]) || !std::isfinite(coded.minima[i])) throw_not_finite();
        // A matrix with mixed formats has no common offset, so offsets are folded into the 8-bit values or the minima.
        const float offset = traits_of(type).offset;
        const int shift = m.format == Format::codes8 ? int(offset) : 0;
        if (m.format == Format::codes4 && offset != m.offset)
          for (size_t i = 0; i < coded.scales.size(); ++i) coded.minima[i] += coded.scales[i] * offset;
        pack_code_lane(m, coded, lane, shift, out);
      } else {
        floats[size_t(lane)].resize(size_t(m.cols));
        dequantize_row(type, data, m.cols, floats[size_t(lane)].data());
      }
    }
    if (!m.has_codes()) pack_float_panel(m, floats, out);
  }
}

bool has_one_scale(const Matrix& m) {
  if (m.format != Format::codes8 || m.has_min || m.offset != 0.0f) return false;
  const size_t scales = size_t(m.scale_bytes());
  for (int p = 0; p < m.panels; ++p) {
    const uint8_t* first = m.data + size_t(p) * m.panel_bytes + m.code_bytes();
    for (int b = 1; b < m.depth / m.block; ++b)
      if (std::memcmp(first, first + size_t(b) * size_t(m.block_bytes()), scales) != 0) return false;
  }
  return true;
}

}  // namespace kvferry
