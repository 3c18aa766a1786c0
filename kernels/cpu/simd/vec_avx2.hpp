// Vectors of 16 floats as two AVX2 registers, with FMA and F16C. vec_portable.hpp documents the names.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/kv_type.hpp"
#include "data/matrix.hpp"

namespace kvferry::avx2 {

struct V {
  __m256 a, b;
};

static inline V v_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V v_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V v_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void v_store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline V v_add(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V v_sub(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V v_mul(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V v_div(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V v_fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V v_max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V v_min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V v_zero_below(V x, V a, float limit) {
  const __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(a.a, bound, _CMP_LT_OQ), x.a),
          _mm256_andnot_ps(_mm256_cmp_ps(a.b, bound, _CMP_LT_OQ), x.b)};
}
static inline V v_round(V x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
static inline __m256 exp2i_half(__m256 whole) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}
static inline V v_exp2i(V whole) { return {exp2i_half(whole.a), exp2i_half(whole.b)}; }
static inline float v_reduce_add(V x) {
  const __m256 half = _mm256_add_ps(x.a, x.b);
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float v_reduce_max(V x) {
  const __m256 half = _mm256_max_ps(x.a, x.b);
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline V v_load_bytes(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))))};
}
static inline V v_load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline void v_load_pairs(const uint16_t* p, V& first, V& second) {
  const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 16));
  const __m256i high = _mm256_set1_epi32(int(0xffff0000));
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
static inline __m256 bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline V v_load_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
static inline __m256i to_bf16_half(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, quiet, is_nan);
}
static inline void v_store_bf16(uint16_t* p, V x) {
  const __m256i packed = _mm256_packus_epi32(to_bf16_half(x.a), to_bf16_half(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline __m128i to_int8(V whole) {
  const __m256i words =
      _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(whole.a), _mm256_cvtps_epi32(whole.b)), 0xd8);
  return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
static inline void v_store_int8(int8_t* p, V whole) { _mm_storeu_si128((__m128i*)p, to_int8(whole)); }

template <KvType K>
static inline __m256 value_half(const uint8_t* p) {
  return K == KvType::bf16 ? bf16_half((const uint16_t*)p) : _mm256_loadu_ps((const float*)p);
}
template <KvType K>
static inline void transpose_quarter(const uint8_t* from, size_t row, float* to) {
  __m256 r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = value_half<K>(from + i * row);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + 16 * i, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps(to + 16 * (i + 4), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
template <KvType K>
static inline void v_transpose(const uint8_t* from, size_t row, float* to) {
  for (int half = 0; half < 2; ++half) {
    transpose_quarter<K>(from, row, to);
    transpose_quarter<K>(from + 8 * item_bytes(K), row, to + 128);
    from += 8 * row;
    to += 8;
  }
}

// --- products of 16-bit integers -----------------------------------------------------------------------------------
// These are GCC vector types, since the compiler keeps arrays of them in registers, but keeps arrays of __m256i in
// memory.
typedef short Int16x16 __attribute__((vector_size(32)));
typedef int Int32x8 __attribute__((vector_size(32)));
struct W {
  Int16x16 a, b;
};
struct I {
  Int32x8 a, b;
};

static inline W w_load(const int16_t* p) {
  return {(Int16x16)_mm256_loadu_si256((const __m256i*)p), (Int16x16)_mm256_loadu_si256((const __m256i*)(p + 16))};
}
static inline void w_store(int16_t* p, W x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)x.a);
  _mm256_storeu_si256((__m256i*)(p + 16), (__m256i)x.b);
}
static inline W w_code4(W packed, int pair) {
  const __m256i low = _mm256_set1_epi16(15);
  const int by = 4 * nibble_of_pair(pair);
  return {(Int16x16)_mm256_and_si256(_mm256_srli_epi16((__m256i)packed.a, by), low),
          (Int16x16)_mm256_and_si256(_mm256_srli_epi16((__m256i)packed.b, by), low)};
}
static inline W w_table(const int8_t* values) {
  const Int16x16 both = (Int16x16)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values));
  return {both, both};
}
// A byte shuffle looks up nibbles 0 and 2, or 1 and 3; pairs of them are sign-extended from the low or high bytes.
static inline __m256i half_table4(__m256i packed, __m256i table, int nibble) {
  const __m256i shifted = nibble % 2 ? _mm256_srli_epi16(packed, 4) : packed;
  const __m256i values = _mm256_shuffle_epi8(table, _mm256_and_si256(shifted, _mm256_set1_epi8(15)));
  return _mm256_srai_epi16(nibble < 2 ? _mm256_slli_epi16(values, 8) : values, 8);
}
static inline W w_table4(W packed, W table, int pair) {
  const int nibble = nibble_of_pair(pair);
  return {(Int16x16)half_table4((__m256i)packed.a, (__m256i)table.a, nibble),
          (Int16x16)half_table4((__m256i)packed.b, (__m256i)table.a, nibble)};
}
static inline __m256i last6(__m256i a, __m256i b, __m256i c) {
  const auto bits = [](__m256i words, int by, int mask) {
    return _mm256_and_si256(_mm256_srli_epi16(words, by), _mm256_set1_epi8(char(mask)));
  };
  return _mm256_or_si256(bits(a, 6, 0x03), _mm256_or_si256(bits(b, 4, 0x0c), bits(c, 2, 0x30)));
}
static inline W w_last6(W a, W b, W c) {
  return {(Int16x16)last6((__m256i)a.a, (__m256i)b.a, (__m256i)c.a),
          (Int16x16)last6((__m256i)a.b, (__m256i)b.b, (__m256i)c.b)};
}
static inline W w_code6(W words, int byte) {
  const __m256i mask = _mm256_set1_epi16(63), least = _mm256_set1_epi16(kLeast6);
  const auto half = [&](Int16x16 x) {
    const __m256i shifted = byte ? _mm256_srli_epi16((__m256i)x, 8) : (__m256i)x;
    return (Int16x16)_mm256_add_epi16(_mm256_and_si256(shifted, mask), least);
  };
  return {half(words.a), half(words.b)};
}
static inline W w_codes8(const int8_t* p) {
  return {(Int16x16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
          (Int16x16)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
static inline I i_zero() { return {Int32x8{}, Int32x8{}}; }
static inline I i_add(I sum, W codes, uint32_t pair) {
  const __m256i inputs = _mm256_set1_epi32(int(pair));
  return {sum.a + (Int32x8)_mm256_madd_epi16((__m256i)codes.a, inputs),
          sum.b + (Int32x8)_mm256_madd_epi16((__m256i)codes.b, inputs)};
}
static inline V i_float(I sum) { return {_mm256_cvtepi32_ps((__m256i)sum.a), _mm256_cvtepi32_ps((__m256i)sum.b)}; }
static inline void v_store_int16(int16_t* p, V whole) {
  _mm256_storeu_si256(
      (__m256i*)p,
      _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(whole.a), _mm256_cvtps_epi32(whole.b)), 0xd8));
}

static inline void v_store_int16_quads(int16_t* p, V whole) {
  v_store_int16(p, whole);
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  _mm256_storeu_si256((__m256i*)p, _mm256_shuffle_epi8(_mm256_loadu_si256((const __m256i*)p), order));
}
static inline void w_interleave(const uint8_t* x, const uint8_t* y, int16_t* out) {
  const __m128i a = _mm_loadu_si128((const __m128i*)x), b = _mm_loadu_si128((const __m128i*)y);
  _mm256_storeu_si256((__m256i*)out, _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)));
  _mm256_storeu_si256((__m256i*)(out + 16), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b)));
}
static inline void w_transpose(const uint8_t* from, size_t row, int16_t* out) {
  for (int half = 0; half < 2; ++half, from += 8 * row, out += 16) {
    __m256i r[4], t[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      r[i] = _mm256_set_m128i(_mm_loadu_si128((const __m128i*)(from + (i + 4) * row)),
                              _mm_loadu_si128((const __m128i*)(from + i * row)));
    t[0] = _mm256_unpacklo_epi32(r[0], r[1]);
    t[1] = _mm256_unpackhi_epi32(r[0], r[1]);
    t[2] = _mm256_unpacklo_epi32(r[2], r[3]);
    t[3] = _mm256_unpackhi_epi32(r[2], r[3]);
    const __m256i quads[4] = {_mm256_unpacklo_epi64(t[0], t[2]), _mm256_unpackhi_epi64(t[0], t[2]),
                              _mm256_unpacklo_epi64(t[1], t[3]), _mm256_unpackhi_epi64(t[1], t[3])};
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      _mm256_storeu_si256((__m256i*)(out + q * 64), _mm256_srai_epi16(_mm256_slli_epi16(quads[q], 8), 8));
      _mm256_storeu_si256((__m256i*)(out + q * 64 + 32), _mm256_srai_epi16(quads[q], 8));
    }
  }
}

// --- products of bytes ---------------------------------------------------------------------------------------------
struct B {
  __m256i a, b;
};
struct S {  // for 4-bit weights, two int16 sums per lane, which 32 inputs cannot overflow (16 * 15 * 127 < 2^15)
  __m256i a, b;
};

static inline void b_codes4(const uint8_t* p, B& low, B& high) {
  const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 32));
  const __m256i mask = _mm256_set1_epi8(15);
  low = {_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)};
  high = {_mm256_and_si256(_mm256_srli_epi16(a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(b, 4), mask)};
}
static inline B b_table(const int8_t* values) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values));
  return {both, both};
}
static inline B b_look_up(B table, B indices) {
  return {_mm256_shuffle_epi8(table.a, indices.a), _mm256_shuffle_epi8(table.a, indices.b)};
}
static inline void b_codes6(const uint8_t* p, B (&quads)[4]) {
  const __m256i mask = _mm256_set1_epi8(63), least = _mm256_set1_epi8(kLeast6);
  for (int half = 0; half < 2; ++half, p += 32) {
    const auto load = [p](int i) { return _mm256_loadu_si256((const __m256i*)(p + 64 * i)); };
    const __m256i words[4] = {load(0), load(1), load(2), last6(load(0), load(1), load(2))};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      (half ? quads[i].b : quads[i].a) = _mm256_add_epi8(_mm256_and_si256(words[i], mask), least);
  }
}
static inline B b_codes8(const uint8_t* p) {
  const __m256i first = _mm256_loadu_si256((const __m256i*)p), second = _mm256_loadu_si256((const __m256i*)(p + 32));
  const __m256i low = _mm256_unpacklo_epi8(first, second), high = _mm256_unpackhi_epi8(first, second);
  return {_mm256_permute2x128_si256(low, high, 0x20), _mm256_permute2x128_si256(low, high, 0x31)};
}
static inline S s_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline S s_start8(int32_t) { return s_zero(); }
static inline S s_add4(S sum, B codes, uint32_t quad) {
  const __m256i inputs = _mm256_set1_epi32(int(quad));
  return {_mm256_add_epi16(sum.a, _mm256_maddubs_epi16(codes.a, inputs)),
          _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(codes.b, inputs))};
}
// vpmaddubsw has one unsigned operand, so the signs of the weights are moved to the inputs. |-128| = 128 does not
// overflow: 2 * 128 * 127 < 2^15.
static inline __m256i add8_half(__m256i sum, __m256i codes, __m256i inputs) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(inputs, codes));
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
static inline S s_add8(S sum, B codes, uint32_t quad) {
  const __m256i inputs = _mm256_set1_epi32(int(quad));
  return {add8_half(sum.a, codes.a, inputs), add8_half(sum.b, codes.b, inputs)};
}
static inline V s_float4(S sum) {
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_cvtepi32_ps(_mm256_madd_epi16(sum.a, ones)), _mm256_cvtepi32_ps(_mm256_madd_epi16(sum.b, ones))};
}
static inline V s_float8(S sum) { return {_mm256_cvtepi32_ps(sum.a), _mm256_cvtepi32_ps(sum.b)}; }
static inline void v_store_int8_quads(int8_t* p, V whole) {
  _mm_storeu_si128((__m128i*)p, _mm_shuffle_epi8(to_int8(whole),
                                                 _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)));
}

}  // namespace kvferry::avx2
