// Vectors of 16 floats in plain C++ (four vectors of four floats), for any compiler and machine. This header documents
// the names that vec_avx2.hpp and vec_avx512.hpp also define; kernels are written once, in terms of these names.
//
//   V  16 floats       W  16 pairs of int16    I  16 int32 sums of W products
//                      B  16 quads of int8     S  16 int32 sums of B products
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "data/kv_type.hpp"
#include "data/matrix.hpp"

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

#define KVFERRY_LANES(expression)                    \
  V r;                                               \
  for (int i = 0; i < 4; ++i) r.q[i] = (expression); \
  return r

static inline V v_add(V a, V b) { KVFERRY_LANES(a.q[i] + b.q[i]); }
static inline V v_sub(V a, V b) { KVFERRY_LANES(a.q[i] - b.q[i]); }
static inline V v_mul(V a, V b) { KVFERRY_LANES(a.q[i] * b.q[i]); }
static inline V v_div(V a, V b) { KVFERRY_LANES(a.q[i] / b.q[i]); }
// Fused if the target has FMA; otherwise (x86 without FMA) the product is rounded before the addition.
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
// v_max and v_min return the second operand if either operand is NaN. v_zero_below is 0 where a < limit, otherwise x.
static inline V v_zero_below(V x, V a, float limit) {
  const V bound = v_set(limit);
  KVFERRY_LANES((f4)((i4)x.q[i] & ~(a.q[i] < bound.q[i])));
}

// Rounding to the nearest integer, and 2^x of an integer, for |x| < 2^22.
static inline V v_round(V x) {
  const f4 magic = {12582912.0f, 12582912.0f, 12582912.0f, 12582912.0f};
  KVFERRY_LANES((x.q[i] + magic) - magic);
}
static inline V v_exp2i(V whole) {
  const i4 bias = {127, 127, 127, 127};
  KVFERRY_LANES((f4)((__builtin_convertvector(whole.q[i], i4) + bias) << 23));
}
#undef KVFERRY_LANES

static inline float v_reduce_add(V x) {
  f4 s = (x.q[0] + x.q[2]) + (x.q[1] + x.q[3]);
  return (s[0] + s[2]) + (s[1] + s[3]);
}
static inline float v_reduce_max(V x) {
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

static inline V v_load_bytes(const int8_t* p) {
  V r;
  for (int i = 0; i < 16; ++i) r.q[i / 4][i % 4] = float(p[i]);
  return r;
}

static inline V v_load_half(const uint16_t* p) {
  V r;
  for (int i = 0; i < 16; ++i) r.q[i / 4][i % 4] = half_to_float(p[i]);
  return r;
}

// Splits 16 pairs of bfloat16 into the first and the second elements.
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

// Stores 16 integral floats in [-127, 127].
static inline void v_store_int8(int8_t* p, V whole) {
  for (int i = 0; i < 16; ++i) p[i] = int8_t(whole.q[i / 4][i % 4]);
}

// Transposes 16 rows of 16 values, `row` bytes apart, to floats: value j of row i is stored at to[16 j + i].
template <KvType K>
static inline void v_transpose(const uint8_t* from, size_t row, float* to) {
  for (int i = 0; i < 16; ++i, from += row) {
    const V v = K == KvType::bf16 ? v_load_bf16((const uint16_t*)from) : v_load((const float*)from);
    for (int j = 0; j < 16; ++j) to[16 * j + i] = v.q[j / 4][j % 4];
  }
}

// --- products of 16-bit integers -----------------------------------------------------------------------------------
// 16 lanes of two adjacent quantized values, and 16 integer sums of their products.
struct W {
  int16_t v[32];
};
struct I {
  int32_t v[16];
};

static inline W w_load(const int16_t* p) {
  W r;
  std::memcpy(r.v, p, sizeof r.v);
  return r;
}
static inline void w_store(int16_t* p, W x) { std::memcpy(p, x.v, sizeof x.v); }
// Unpacks one of the four pairs in each lane of packed 4-bit values; see weights/pack.hpp.
static inline W w_code4(W packed, int pair) {
  W r;
  for (int j = 0; j < 32; ++j) r.v[j] = int16_t(uint16_t(packed.v[j]) >> (4 * nibble_of_pair(pair)) & 15);
  return r;
}
// Holds the 16 values of a table, and unpacks a pair as `w_code4` does, with each index replaced by its value.
static inline W w_table(const int8_t* values) {
  W r = {};
  for (int i = 0; i < 16; ++i) r.v[i] = values[i];
  return r;
}
static inline W w_table4(W packed, W table, int pair) {
  W r = w_code4(packed, pair);
  for (int j = 0; j < 32; ++j) r.v[j] = table.v[r.v[j]];
  return r;
}
// Collects the fourth word of each lane in a group of codes6 from the upper two bits of each byte of three words; see
// weights/pack.hpp.
static inline W w_last6(W a, W b, W c) {
  W r;
  for (int j = 0; j < 32; ++j)
    r.v[j] =
        int16_t((uint16_t(a.v[j]) >> 6 & 0x0303) | (uint16_t(b.v[j]) >> 4 & 0x0c0c) | (uint16_t(c.v[j]) >> 2 & 0x3030));
  return r;
}
// Unpacks the pair of the lower or upper bytes of each lane in codes6.
static inline W w_code6(W words, int byte) {
  W r;
  for (int j = 0; j < 32; ++j) r.v[j] = int16_t((uint16_t(words.v[j]) >> (8 * byte) & 63) + kLeast6);
  return r;
}
// Sign-extends 32 8-bit values; value j of lane o is byte 2 o + j.
static inline W w_codes8(const int8_t* p) {
  W r;
  for (int j = 0; j < 32; ++j) r.v[j] = p[j];
  return r;
}
static inline I i_zero() { return {}; }
// Adds products of two inputs of a row with weights of at most 8 bits; a sum has at most 256 inputs.
static inline I i_add(I sum, W codes, uint32_t pair) {
  int16_t q[2];
  std::memcpy(q, &pair, 4);
  for (int o = 0; o < 16; ++o) sum.v[o] += codes.v[2 * o] * q[0] + codes.v[2 * o + 1] * q[1];
  return sum;
}
static inline V i_float(I sum) {
  V r;
  for (int o = 0; o < 16; ++o) r.q[o / 4][o % 4] = float(sum.v[o]);
  return r;
}
// Stores 16 integral floats with saturation; NaN is saturated as well.
static inline void v_store_int16(int16_t* p, V whole) {
  for (int i = 0; i < 16; ++i) {
    const float x = whole.q[i / 4][i % 4];
    p[i] = int16_t(x > -32767.0f ? x < 32767.0f ? x : 32767.0f : -32767.0f);
  }
}
// Stores 16 integral floats with saturation, every four in the order 0 2 1 3.
static inline void v_store_int16_quads(int16_t* p, V whole) {
  v_store_int16(p, whole);
  for (int i = 1; i < 16; i += 4) std::swap(p[i], p[i + 1]);
}
// Interleaves 16 values of two rows as int16.
static inline void w_interleave(const uint8_t* x, const uint8_t* y, int16_t* out) {
  for (int i = 0; i < 16; ++i) {
    out[2 * i] = int8_t(x[i]);
    out[2 * i + 1] = int8_t(y[i]);
  }
}
// Transposes 16 rows of 16 values, `row` bytes apart, to int16 [8 pairs][16 rows][2], every four values in the order 0
// 2 1 3.
static inline void w_transpose(const uint8_t* from, size_t row, int16_t* out) {
  constexpr int order[4] = {0, 2, 1, 3};
  for (int i = 0; i < 16; ++i)
    for (int d = 0; d < 16; ++d) out[d / 2 * 32 + i * 2 + d % 2] = int8_t(from[i * row + d / 4 * 4 + order[d % 4]]);
}

// --- products of bytes ---------------------------------------------------------------------------------------------
// B has 16 lanes of four quantized values, which are multiplied by four inputs in the order 0 2 1 3. S has the sum of
// each lane's products.
struct B {
  int8_t v[64];
};
struct S {
  int32_t v[16];
};

// Splits 64 bytes of 4-bit values into the first and the second quad of each lane.
static inline void b_codes4(const uint8_t* p, B& low, B& high) {
  for (int i = 0; i < 64; ++i) {
    low.v[i] = int8_t(p[i] & 15);
    high.v[i] = int8_t(p[i] >> 4);
  }
}
// Holds the 16 values of a table, and replaces 64 indices by their values, which `s_add8` multiplies.
static inline B b_table(const int8_t* values) {
  B r = {};
  std::memcpy(r.v, values, 16);
  return r;
}
static inline B b_look_up(B table, B indices) {
  B r;
  for (int i = 0; i < 64; ++i) r.v[i] = table.v[indices.v[i]];
  return r;
}
// Unpacks a group of codes6 to four quads of each lane.
static inline void b_codes6(const uint8_t* p, B (&quads)[4]) {
  for (int i = 0; i < 64; ++i) {
    const int last = p[i] >> 6 | (p[64 + i] >> 6) << 2 | (p[128 + i] >> 6) << 4;
    for (int q = 0; q < 4; ++q) quads[q].v[i] = int8_t((q < 3 ? p[64 * q + i] & 63 : last) + kLeast6);
  }
}
// Combines 64 bytes of 8-bit values (two pairs per lane) into one quad per lane.
static inline B b_codes8(const uint8_t* p) {
  B quads;
  for (int o = 0; o < 16; ++o)
    for (int j = 0; j < 2; ++j) {
      quads.v[4 * o + 2 * j] = int8_t(p[2 * o + j]);
      quads.v[4 * o + 2 * j + 1] = int8_t(p[32 + 2 * o + j]);
    }
  return quads;
}
static inline S s_zero() { return {}; }
// Initial value of a sum with 8-bit weights, given the sum of all inputs that will be multiplied.
static inline S s_start8(int32_t) { return {}; }
// Adds products of four inputs of a row with 4-bit weights (at most 32 inputs per sum) or 8-bit weights.
static inline S s_add4(S sum, B codes, uint32_t quad) {
  int8_t q[4];
  std::memcpy(q, &quad, 4);
  for (int o = 0; o < 16; ++o)
    sum.v[o] +=
        codes.v[4 * o] * q[0] + codes.v[4 * o + 1] * q[1] + codes.v[4 * o + 2] * q[2] + codes.v[4 * o + 3] * q[3];
  return sum;
}
static inline S s_add8(S sum, B codes, uint32_t quad) { return s_add4(sum, codes, quad); }
static inline V s_float8(S sum) {
  V r;
  for (int o = 0; o < 16; ++o) r.q[o / 4][o % 4] = float(sum.v[o]);
  return r;
}
static inline V s_float4(S sum) { return s_float8(sum); }
// Stores 16 integral floats in [-127, 127], every four in the order 0 2 1 3.
static inline void v_store_int8_quads(int8_t* p, V whole) {
  constexpr int order[4] = {0, 2, 1, 3};
  for (int q = 0; q < 4; ++q)
    for (int i = 0; i < 4; ++i) p[4 * q + i] = int8_t(whole.q[q][order[i]]);
}

}  // namespace kvferry::portable
