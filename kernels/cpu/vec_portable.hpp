// Sixteen floats at a time in plain C++: four vectors of four, which every compiler and machine has.
// The same names as vec_avx2.hpp and vec_avx512.hpp; whoever includes one of the three writes kernels once.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvferry::portable {

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

struct V {
  f4 q[4];
};

static inline V v_set(float x) {
  f4 q = {x, x, x, x};
  return {{q, q, q, q}};
}
static inline V v_zero() { return v_set(0.0f); }
static inline V v_load(const float* p) {
  V r;
  std::memcpy(&r, p, 64);
  return r;
}
static inline void v_store(float* p, V x) { std::memcpy(p, &x, 64); }

#define KVFERRY_LANES(expression) \
  V r;                            \
  for (int i = 0; i < 4; ++i) r.q[i] = (expression); \
  return r

static inline V v_add(V a, V b) { KVFERRY_LANES(a.q[i] + b.q[i]); }
static inline V v_sub(V a, V b) { KVFERRY_LANES(a.q[i] - b.q[i]); }
static inline V v_mul(V a, V b) { KVFERRY_LANES(a.q[i] * b.q[i]); }
static inline V v_div(V a, V b) { KVFERRY_LANES(a.q[i] / b.q[i]); }
// Fused where the machine has it; on x86 without FMA a product is rounded before it is added.
#if defined(__FP_FAST_FMAF)
static inline V v_fma(V a, V b, V c) {
  V r;
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) r.q[i][j] = __builtin_fmaf(a.q[i][j], b.q[i][j], c.q[i][j]);
  return r;
}
#else
static inline V v_fma(V a, V b, V c) { KVFERRY_LANES(a.q[i] * b.q[i] + c.q[i]); }
#endif
static inline V v_max(V a, V b) { KVFERRY_LANES(a.q[i] > b.q[i] ? a.q[i] : b.q[i]); }
static inline V v_min(V a, V b) { KVFERRY_LANES(a.q[i] < b.q[i] ? a.q[i] : b.q[i]); }
// Of v_max and v_min: where either is NaN, the second.
// where a < limit: 0, elsewhere x
static inline V v_zero_below(V x, V a, float limit) {
  const V bound = v_set(limit);
  KVFERRY_LANES((f4)((i4)x.q[i] & ~(a.q[i] < bound.q[i])));
}

// Nearest whole number and 2 to its power, for |x| below 2^22.
static inline V v_round(V x) {
  const f4 magic = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f};
  KVFERRY_LANES((x.q[i] + magic) - magic);
}
static inline V v_exp2i(V whole) {
  const i4 bias = {127, 127, 127, 127};
  KVFERRY_LANES((f4)((__builtin_convertvector(whole.q[i], i4) + bias) << 23));
}
#undef KVFERRY_LANES

static inline float v_sum(V x) {
  f4 s = (x.q[0] + x.q[2]) + (x.q[1] + x.q[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
static inline float v_highest(V x) {
  float best = x.q[0][0];
  for (int i = 0; i < 16; ++i) best = x.q[i / 4][i % 4] > best ? x.q[i / 4][i % 4] : best;
  return best;
}

static inline float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  float magnitude;
  if (rest >= 0x7c00) {  // infinity and NaN
    const uint32_t bits = 0x7f800000u | (rest & 0x3ff) << 13;
    std::memcpy(&magnitude, &bits, 4);
  } else if (rest >= 0x400) {
    const uint32_t bits = (rest << 13) + 0x38000000u;
    std::memcpy(&magnitude, &bits, 4);
  } else {
    magnitude = float(rest) * 0x1p-24f;
  }
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  bits |= sign;
  std::memcpy(&magnitude, &bits, 4);
  return magnitude;
}

static inline V v_load_half(const uint16_t* p) {
  V r;
  for (int i = 0; i < 16; ++i) r.q[i / 4][i % 4] = half_to_float(p[i]);
  return r;
}

// Sixteen lanes of two bfloat16 each: the first of each pair, and the second.
static inline void v_load_pairs(const uint16_t* p, V& first, V& second) {
  for (int i = 0; i < 4; ++i) {
    i4 lanes;
    std::memcpy(&lanes, p + 8 * i, 16);
    first.q[i] = (f4)(lanes << 16);
    second.q[i] = (f4)(lanes & (int32_t)0xffff0000);
  }
}
static inline V v_load_bf16(const uint16_t* p) {
  V r;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = uint32_t(p[i]) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    r.q[i / 4][i % 4] = x;
  }
  return r;
}
static inline void v_store_bf16(uint16_t* p, V x) {
  for (int i = 0; i < 16; ++i) {
    uint32_t bits;
    const float lane = x.q[i / 4][i % 4];
    std::memcpy(&bits, &lane, 4);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    p[i] = is_nan ? uint16_t(bits >> 16 | 0x40) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// 64 bytes of 4-bit codes: code `2 i + j` of lane `o` is nibble i of word 2 o + j.
static inline void v_codes4(const uint8_t* p, V out[8]) {
  for (int q = 0; q < 4; ++q) {
    i4 lanes;
    std::memcpy(&lanes, p + 16 * q, 16);
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 2; ++j) out[2 * i + j].q[q] = __builtin_convertvector((lanes >> (16 * j + 4 * i)) & 15, f4);
  }
}
// 32 bytes of 8-bit codes: code j of lane o is byte 2 o + j.
static inline void v_codes8(const int8_t* p, V& first, V& second) {
  for (int o = 0; o < 16; ++o) {
    first.q[o / 4][o % 4] = float(p[2 * o]);
    second.q[o / 4][o % 4] = float(p[2 * o + 1]);
  }
}
static inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace kvferry::portable
