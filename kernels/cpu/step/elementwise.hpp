// Row-wise operations between the products of a step: RMSNorm, RoPE, SiLU, embedding rows.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/matrix.hpp"
#include "simd/math.hpp"
#include "simd/simd.hpp"

namespace kvferry::KVFERRY_LEVEL {

// 1 / rms(x), with epsilon added to the mean of squares.
static inline float inverse_rms(const float* x, int n, float epsilon) {
  V squares = v_zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V v = v_load(x + i);
    squares = v_fma(v, v, squares);
  }
  float sum = v_reduce_add(squares);
  for (; i < n; ++i) sum += x[i] * x[i];
  return 1.0f / __builtin_sqrtf(sum / float(n) + epsilon);
}

// to = x / rms(x) * weight (Zhang and Sennrich, RMSNorm, 2019).
static inline void rms_norm(const float* x, const float* weight, int n, float epsilon, float* to) {
  const float scale = inverse_rms(x, n, epsilon);
  const V s = v_set(scale);
  int i = 0;
  for (; i + 16 <= n; i += 16) v_store(to + i, v_mul(v_mul(v_load(x + i), s), v_load(weight + i)));
  for (; i < n; ++i) to[i] = x[i] * scale * weight[i];
}

// Dequantizes a row of a packed matrix.
static inline void dequantize_matrix_row(const Matrix& m, int row, float* to) {
  const uint8_t* panel = m.data + size_t(row / kPanel) * m.panel_bytes;
  const int lane = row % kPanel;
  const auto half = [](const uint8_t* at) {
    alignas(64) uint16_t lanes[16] = {};
    alignas(64) float wide[16];
    std::memcpy(lanes, at, 2);
    v_store(wide, v_load_half(lanes));
    return wide[0];
  };
  const auto scale_at = [&](const uint8_t* scales, const uint8_t* factors) {
    if (m.factor_blocks) return half(factors + lane * 2) * float(int8_t(scales[lane]));
    if (m.half_scales) return half(scales + lane * 2);
    float value;
    std::memcpy(&value, scales + lane * 4, 4);
    return value;
  };
  for (int k = 0; k < m.cols; ++k) {
    switch (m.format) {
      case Format::f32: std::memcpy(to + k, panel + (size_t(k) * kPanel + lane) * 4, 4); break;
      case Format::f16: to[k] = half(panel + (size_t(k) * kPanel + lane) * 2); break;
      case Format::bf16: {
        uint16_t bits;
        std::memcpy(&bits, panel + (size_t(k / 2) * 32 + lane * 2 + k % 2) * 2, 2);
        const uint32_t wide = uint32_t(bits) << 16;
        std::memcpy(to + k, &wide, 4);
        break;
      }
      default: {
        const uint8_t* block = panel + m.block_at(k / m.block);
        const uint8_t* factors = panel + m.factors_at(k / m.block);
        const int inner = k % m.block;
        float code;
        if (has_nibbles(m.format)) {
          uint16_t word;
          std::memcpy(&word, block + (inner / 8) * 64 + (lane * 2 + inner % 2) * 2, 2);
          const int nibble = word >> (4 * nibble_of_pair(inner % 8 / 2)) & 15;
          code = float(m.format == Format::table4 ? m.table[nibble] : nibble);
        } else if (m.format == Format::codes6) {
          const int inputs = group_inputs(m.format), pair = inner % inputs / 2;
          const uint8_t* at = block + inner / inputs * group_bytes(m.format) + (lane * 2 + inner % 2) * 2 + pair % 2;
          const int last = at[0] >> 6 | (at[64] >> 6) << 2 | (at[128] >> 6) << 4;
          code = float((pair < 6 ? at[pair / 2 * 64] & 63 : last) + kLeast6);
        } else {
          code = float(int8_t(block[(inner / 2) * 32 + lane * 2 + inner % 2]));
        }
        const uint8_t* scales = block + m.code_bytes();
        const float scale = scale_at(scales, factors);
        to[k] = scale * code + (m.has_min ? scale_at(scales + m.scale_bytes(), factors + 32) : scale * m.offset);
      }
    }
  }
}

// Dequantizes `count` rows of a packed matrix into to [count][cols].
static void dequantize_rows(const Matrix& m, const int64_t* rows, int count, float* to) {
  for (int i = 0; i < count; ++i) dequantize_matrix_row(m, int(rows[i]), to + size_t(i) * m.cols);
}

static inline void apply_rope(float* x, const float* cos, const float* sin, int n) {
  const int half = n / 2;
  int i = 0;
  for (; i + 16 <= half; i += 16) {
    const V a = v_load(x + i), b = v_load(x + half + i);
    v_store(x + i, v_fma(a, v_load(cos + i), v_mul(b, v_load(sin + i))));
    v_store(x + half + i, v_fma(b, v_load(cos + half + i), v_mul(a, v_load(sin + half + i))));
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] + b * sin[i];
    x[half + i] = b * cos[half + i] + a * sin[half + i];
  }
}

// x / (1 + e^-x); if `rough`, approximately, because the result is rounded to bfloat16 or int8.
static inline V silu(V x, bool rough) {
#if KVFERRY_PAIRS
  if (rough) return v_div_approx(x, v_add(v_set(1.0f), v_exp2_approx(v_mul(x, v_set(-kLog2E)))));
#endif
  return v_div(x, v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x))));
}

// GELU in its tanh approximation (Hendrycks and Gimpel, 2016): x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
static inline V gelu_tanh(V x) {
  const V inner = v_fma(v_mul(v_mul(x, x), v_set(0.044715f)), x, x);
  return v_div(x, v_add(v_set(1.0f), v_exp(v_mul(inner, v_set(-1.5957691216f)))));
}

// g sigmoid(alpha g) (u + 1), with a gate value g clamped from above and an up value u clamped on both sides. A NaN is
// the second operand of each comparison, which then returns it.
static inline V clamped_swiglu(V gate, V up, float alpha, float limit) {
  const V g = v_min(v_set(limit), gate), u = v_max(v_set(-limit), v_min(v_set(limit), up));
  return v_mul(v_add(u, v_set(1.0f)), v_div(g, v_add(v_set(1.0f), v_exp(v_mul(g, v_set(-alpha))))));
}

// sum = x + by * y / rms(y) * weight; `sum` may be x.
static inline void add_normed(const float* x, const float* y, const float* weight, int n, float epsilon, float by,
                              float* sum) {
  const float scale = by * inverse_rms(y, n, epsilon);
  const V s = v_set(scale);
  int i = 0;
  for (; i + 16 <= n; i += 16) v_store(sum + i, v_fma(v_mul(v_load(y + i), s), v_load(weight + i), v_load(x + i)));
  for (; i < n; ++i) sum[i] = x[i] + y[i] * scale * weight[i];
}

}  // namespace kvferry::KVFERRY_LEVEL
