// Vectors of 16 floats as one AVX-512 register, with BF16 and VNNI. vec_portable.hpp documents the names. Only this
// level has dot products of bf16 pairs (`p_`) and conversions of quantized values to such pairs. Of the int16
// operations (`w_`, `i_`), it has only the ones that attention uses.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/kv_type.hpp"
#include "data/matrix.hpp"
#include "simd/target.hpp"

#if !KVFERRY_PAIRS
#error "define KVFERRY_TARGET_AVX512_BF16 or KVFERRY_TARGET_AMX_BF16; simd/target.hpp"
#endif

namespace kvferry::KVFERRY_LEVEL {

struct V {
  __m512 v;
};

static inline V v_set(float x) { return {_mm512_set1_ps(x)}; }
static inline V v_zero() { return {_mm512_setzero_ps()}; }
static inline V v_load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void v_store(float* p, V x) { _mm512_storeu_ps(p, x.v); }
static inline V v_add(V x, V y) { return {_mm512_add_ps(x.v, y.v)}; }
static inline V v_sub(V x, V y) { return {_mm512_sub_ps(x.v, y.v)}; }
static inline V v_mul(V x, V y) { return {_mm512_mul_ps(x.v, y.v)}; }
static inline V v_div(V x, V y) { return {_mm512_div_ps(x.v, y.v)}; }
static inline V v_fma(V x, V y, V z) { return {_mm512_fmadd_ps(x.v, y.v, z.v)}; }
static inline V v_max(V x, V y) { return {_mm512_max_ps(x.v, y.v)}; }
static inline V v_min(V x, V y) { return {_mm512_min_ps(x.v, y.v)}; }
static inline V v_zero_below(V x, V a, float limit) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), x.v)};
}
static inline V v_round(V x) { return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
static inline V v_exp2i(V whole) { return {_mm512_scalef_ps(_mm512_set1_ps(1.0f), whole.v)}; }
static inline float v_reduce_add(V x) {
  const __m256 half =
      _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)));
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float v_reduce_max(V x) { return _mm512_reduce_max_ps(x.v); }
static inline V v_load_bytes(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
static inline V v_load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
static inline void v_load_pairs(const uint16_t* p, V& first, V& second) {
  const __m512i lanes = _mm512_loadu_si512(p);
  first = {_mm512_castsi512_ps(_mm512_slli_epi32(lanes, 16))};
  second = {_mm512_castsi512_ps(_mm512_and_si512(lanes, _mm512_set1_epi32(int(0xffff0000))))};
}
static inline V v_load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
static inline void v_store_bf16(uint16_t* p, V x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v));
}

// 2^x with relative error 3e-6, for results that are rounded to bfloat16; underflows to 0. The fraction uses a minimax
// polynomial of degree 4; vscalefps applies the integer part.
static inline V v_exp2_approx(V x) {
  const __m512 f = _mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 y = _mm512_set1_ps(0.013534168f);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.0520114611f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.241442756f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(0.693003835f));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.00000259f));
  return {_mm512_scalef_ps(y, x.v)};
}

// x / y with relative error 2^-14, for results that are rounded to bfloat16; y must be finite and not 0. On CPUs with
// AMX, exact divisions would take as long as the products.
static inline V v_div_approx(V x, V y) {
#if KVFERRY_AMX
  return {_mm512_mul_ps(x.v, _mm512_rcp14_ps(y.v))};
#else
  return v_div(x, y);
#endif
}

static inline void v_store_int8(int8_t* p, V whole) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole.v)));
}

// Transposes float rows. On this level, transpose_pairs (attention/pages.hpp) transposes bfloat16 rows.
template <KvType K>
static inline void v_transpose(const uint8_t* from, size_t row, float* to) {
  static_assert(K == KvType::f32);
  alignas(64) float lanes[16];
  for (int i = 0; i < 16; ++i, from += row) {
    v_store(lanes, v_load((const float*)from));
    for (int j = 0; j < 16; ++j) to[16 * j + i] = lanes[j];
  }
}

// --- pairs of bfloat16 ---------------------------------------------------------------------------------------------
using P = __m512i;  // 16 lanes of two bfloat16

static inline P p_load(const void* p) { return _mm512_loadu_si512(p); }
static inline void p_store(void* p, P x) { _mm512_storeu_si512(p, x); }
static inline P p_set(uint32_t pair) { return _mm512_set1_epi32(int(pair)); }
static inline void p_store_bf16(uint16_t* p, V first, V second) {
  p_store(p, (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v));
}
// vdpbf16ps rounds to nearest even and flushes denormals to zero, regardless of MXCSR, so results are reproducible.
static inline V p_dot(V sum, P x, P y) { return {_mm512_dpbf16_ps(sum.v, (__m512bh)x, (__m512bh)y)}; }
// Interleaves two rows into lanes (x, y) of the first 16 values and of the last 16 values.
static inline void p_interleave(P x, P y, P& first, P& last) {
  const __m512i order = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  first = _mm512_permutex2var_epi16(x, order, y);
  last = _mm512_permutex2var_epi16(x, _mm512_add_epi16(order, _mm512_set1_epi16(16)), y);
}
static inline P p_interleave_half(const uint16_t* x, const uint16_t* y) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
  return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)y)), 16));
}
// Sign-extends 16 int8 values to int32.
static inline __m512i load_int8_as_int32(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
// Converts integers that are exact in bfloat16 to bf16 pairs, by taking the upper halves of their floats.
static inline P p_from_int32(__m512i first, __m512i second) {
  const __m512i x = _mm512_castps_si512(_mm512_cvtepi32_ps(first)), y = _mm512_castps_si512(_mm512_cvtepi32_ps(second));
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y);
}
// Converts lanes of four int8 values to two bf16 pairs, (0, 1) and (2, 3), scaled by 2^24.
static inline void p_from_codes(__m512i codes, P& first, P& second) {
  const __m512i one =
      _mm512_broadcast_i32x4(_mm_setr_epi8(-1, -1, -1, 1, -1, -1, -1, 5, -1, -1, -1, 9, -1, -1, -1, 13));
  const __m512i two =
      _mm512_broadcast_i32x4(_mm_setr_epi8(-1, -1, -1, 2, -1, -1, -1, 6, -1, -1, -1, 10, -1, -1, -1, 14));
  first = p_from_int32(_mm512_slli_epi32(codes, 24), _mm512_shuffle_epi8(codes, one));
  second = p_from_int32(_mm512_shuffle_epi8(codes, two), _mm512_and_si512(codes, _mm512_set1_epi32(int(0xff000000))));
}
// Converts lanes of four int8 values to two int16 pairs, (0, 2) and (1, 3).
static inline void w_from_codes(__m512i codes, P& first, P& second) {
  first = _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8);
  second = _mm512_srai_epi16(codes, 8);
}
// Table of the integers 0 to 15 as bfloat16, stored twice: the permute reads a 5-bit index, whose top bit belongs to
// the adjacent nibble.
static inline P p_table4() {
  alignas(64) uint16_t table[32];
  for (int i = 0; i < 32; ++i) {
    const float x = float(i & 15);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    table[i] = uint16_t(bits >> 16);
  }
  return _mm512_load_si512(table);
}
// The same for 16 int8 values.
static inline P p_table(const int8_t* values) {
  const __m512i floats = (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)values)));
  return _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(floats, 16)));
}
// Unpacks the 4-bit values of input pair i to bf16; `words` holds the 8 inputs of each row.
[[gnu::always_inline]] static inline P p_code4(P words, P table, int i) {
  return _mm512_permutexvar_epi16(i ? _mm512_srli_epi16(words, unsigned(4 * nibble_of_pair(i))) : words, table);
}
// Unpacks the same pair plus kCodeBias: a quantized value is placed into the upper mantissa bits of 16.0, which takes
// two operations and no table.
constexpr float kCodeBias = 16.0f;
[[gnu::always_inline]] static inline P p_biased4(P words, int i) {
  const int shift = 4 * nibble_of_pair(i) - 3;
  const P at = shift < 0 ? _mm512_slli_epi16(words, unsigned(-shift)) : _mm512_srli_epi16(words, unsigned(shift));
  return _mm512_ternarylogic_epi64(at, _mm512_set1_epi16(0x78), _mm512_set1_epi16(0x4180), 0xea);  // (at & 0x78) | 16.0
}
// The 64 values of codes6 as bfloat16, the second half in `upper`.
static inline void p_table6(P& lower, P& upper) {
  alignas(64) uint16_t table[64];
  for (int i = 0; i < 64; ++i) {
    const float x = float(kLeast6 + i);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    table[i] = uint16_t(bits >> 16);
  }
  lower = _mm512_load_si512(table);
  upper = _mm512_load_si512(table + 32);
}
// Collects the fourth word of a group of codes6 from the upper two bits of each byte of three words. The upper two bits
// of each of its bytes are arbitrary.
[[gnu::always_inline]] static inline P p_last6(P a, P b, P c) {
  const P second = _mm512_set1_epi8(0x0c), third = _mm512_set1_epi8(0x30);
  const P both = _mm512_ternarylogic_epi64(second, _mm512_srli_epi16(b, 4), _mm512_srli_epi16(a, 6), 0xca);
  return _mm512_ternarylogic_epi64(third, _mm512_srli_epi16(c, 2), both, 0xca);
}
// Unpacks the pair of the lower or upper bytes. The permutation ignores all but 6 bits of an index.
[[gnu::always_inline]] static inline P p_code6(P words, P lower, P upper, int byte) {
  return _mm512_permutex2var_epi16(lower, byte ? _mm512_srli_epi16(words, 8) : words, upper);
}
static inline P p_codes8(const int8_t* p) {
  const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
  const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + 16))));
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// --- products of 16-bit integers -----------------------------------------------------------------------------------
struct W {
  __m512i v;
};
struct I {
  __v16si v;  // the operand type of the intrinsic; arrays of __m512i would not stay in registers
};

static inline W w_load(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
static inline I i_zero() { return {(__v16si)_mm512_setzero_si512()}; }
static inline I i_add(I sum, W codes, uint32_t pair) {
  return {(__v16si)_mm512_dpwssd_epi32((__m512i)sum.v, codes.v, _mm512_set1_epi32(int(pair)))};
}
static inline V i_float(I sum) { return {_mm512_cvtepi32_ps((__m512i)sum.v)}; }
static inline __m256i to_int16(V whole) { return _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(whole.v)); }
static inline void v_store_int16(int16_t* p, V whole) { _mm256_storeu_si256((__m256i*)p, to_int16(whole)); }
static inline void v_store_int16_quads(int16_t* p, V whole) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256((__m256i*)p, _mm256_shuffle_epi8(to_int16(whole), order));
}
static inline void w_interleave(const uint8_t* x, const uint8_t* y, int16_t* out) {
  const __m128i a = _mm_loadu_si128((const __m128i*)x), b = _mm_loadu_si128((const __m128i*)y);
  _mm512_storeu_si512(out, _mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b))));
}

// --- products of bytes ---------------------------------------------------------------------------------------------
struct B {
  __m512i v;
};
struct S {
  __v16si v;
};

static inline __m512i order_0213() {
  return _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
}
static inline void b_codes4(const uint8_t* p, B& low, B& high) {
  const __m512i words = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = {_mm512_and_si512(words, mask)};
  high = {_mm512_and_si512(_mm512_srli_epi16(words, 4), mask)};
}
// Unpacks a group of codes6 to four quads of values + `add`.
static inline void quads6(const uint8_t* p, int add, B (&quads)[4]) {
  const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64), c = _mm512_loadu_si512(p + 128);
  const __m512i words[4] = {a, b, c, p_last6(a, b, c)}, plus = _mm512_set1_epi8(char(kLeast6 + add));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) quads[i] = {_mm512_add_epi8(_mm512_and_si512(words[i], _mm512_set1_epi8(63)), plus)};
}
static inline __m512i quads8(const uint8_t* p) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_shuffle_epi8(_mm512_permutexvar_epi16(order, _mm512_loadu_si512(p)), order_0213());
}
// vpdpbusd has one unsigned operand, so weights are biased by 128, and sums start at -128 times the sum of the inputs.
static inline B b_codes8(const uint8_t* p) { return {_mm512_xor_si512(quads8(p), _mm512_set1_epi8(char(0x80)))}; }
static inline void b_codes6(const uint8_t* p, B (&quads)[4]) { quads6(p, 128, quads); }  // biased like b_codes8
static inline B b_signed_table(const int8_t* values) {
  return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)values))};
}
static inline B b_table(const int8_t* values) {  // biased like b_codes8
  return {_mm512_xor_si512(b_signed_table(values).v, _mm512_set1_epi8(char(0x80)))};
}
static inline B b_look_up(B table, B indices) { return {_mm512_shuffle_epi8(table.v, indices.v)}; }
static inline B b_load(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline void b_store(void* p, B x) { _mm512_storeu_si512(p, x.v); }
static inline S s_load(const void* p) { return {(__v16si)_mm512_loadu_si512(p)}; }
static inline S s_zero() { return {(__v16si)_mm512_setzero_si512()}; }
static inline S s_start8(int32_t inputs) { return {(__v16si)_mm512_set1_epi32(-128 * inputs)}; }
static inline S s_add4(S sum, B codes, uint32_t quad) {
  return {(__v16si)_mm512_dpbusd_epi32((__m512i)sum.v, codes.v, _mm512_set1_epi32(int(quad)))};
}
static inline S s_add8(S sum, B codes, uint32_t quad) { return s_add4(sum, codes, quad); }
static inline V s_float4(S sum) { return {_mm512_cvtepi32_ps((__m512i)sum.v)}; }
static inline V s_float8(S sum) { return s_float4(sum); }
static inline void v_store_int8_quads(int8_t* p, V whole) {
  const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole.v));
  _mm_storeu_si128((__m128i*)p, _mm_shuffle_epi8(bytes, _mm512_castsi512_si128(order_0213())));
}

}  // namespace kvferry::KVFERRY_LEVEL
