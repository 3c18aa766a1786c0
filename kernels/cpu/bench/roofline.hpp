// Roofline bounds of a level: peak read bandwidth and peak multiply-add rate.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/pool.hpp"
#include "simd/amx.hpp"
#include "simd/simd.hpp"
#include "products/tiles.hpp"

namespace kvferry::KVFERRY_LEVEL {

namespace {

class ReadJob final : public Job {
 public:
  ReadJob(const uint8_t* data, size_t bytes, int threads) : data_(data), bytes_(bytes), sums_(size_t(threads) * 16) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return int(bytes_ / kPiece); }
  void run(int, int chunk, int thread) override {
    const uint8_t* at = data_ + size_t(chunk) * kPiece;
    V sums[4] = {v_zero(), v_zero(), v_zero(), v_zero()};
    for (size_t i = 0; i < kPiece; i += 256) {
      prefetch(at + i + 2048);
      prefetch(at + i + 2112);
      prefetch(at + i + 2176);
      prefetch(at + i + 2240);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c) sums[c] = v_max(v_load((const float*)(at + i + 64 * c)), sums[c]);
    }
    v_store(&sums_[size_t(thread) * 16], v_max(v_max(sums[0], sums[1]), v_max(sums[2], sums[3])));
  }
  static constexpr size_t kPiece = 256 << 10;

 private:
  const uint8_t* data_;
  size_t bytes_;
  std::vector<float> sums_;
};

constexpr int kSumRounds = 20000, kSums = KVFERRY_PAIRS ? 24 : 6, kQuads = 32;

#if !KVFERRY_AMX
// int8 dot products. Operands differ and are known only at run time, so that the compiler cannot eliminate any product.
static inline V sum_of_bytes(int chunk, int) {
  alignas(64) uint8_t some[64], quads[4 * (kSums + kQuads)];
  for (int i = 0; i < 64; ++i) some[i] = uint8_t(chunk * 7 + i * 37);
  for (int i = 0; i < 4 * (kSums + kQuads); ++i) quads[i] = uint8_t(chunk + i * 11) & 63;
  B codes[2];
  b_codes4(some, codes[0], codes[1]);
  S sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) sums[i] = s_zero();
  for (int n = 0; n < kSumRounds; ++n) {
    const uint8_t* at = quads + 4 * (n % kQuads);
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = s_add4(sums[i], codes[i % 2], inputs_at(at + 4 * i));
  }
  V all = s_float8(sums[0]);
#pragma GCC unroll 24
  for (int i = 1; i < kSums; ++i) all = v_add(all, s_float8(sums[i]));
  return all;
}

// One multiply-add per accumulator; on bf16 pairs if the instruction-set level supports them.
#if KVFERRY_PAIRS
using Factor = P;
static inline Factor factor(int thread) { return p_set(0x3c003c00u + uint32_t(thread)); }
static inline Factor one() { return p_set(0x3f803f80u); }
static inline V add_product(V sum, Factor a, Factor b) { return p_dot(sum, a, b); }
#else
using Factor = V;
static inline Factor factor(int thread) { return v_set(0.01f + float(thread)); }
static inline Factor one() { return v_set(1.0f); }
static inline V add_product(V sum, Factor a, Factor b) { return v_fma(a, b, sum); }
#endif

// Runs multiply-adds of the fastest floating-point type of the instruction-set level: bf16 pairs or floats.
static inline V sum_of_best(int chunk, int thread) {
  const Factor a = one(), b = factor(thread);
  float some[kSums + 15];
  for (int i = 0; i < kSums + 15; ++i) some[i] = float(chunk + i * i);  // all lanes differ, so none can be eliminated
  V sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) sums[i] = v_load(some + i);
  for (int n = 0; n < kSumRounds; ++n)
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = add_product(sums[i], a, b);
  V all = sums[0];
  for (int i = 1; i < kSums; ++i) all = v_add(all, sums[i]);
  return all;
}
#endif

#if KVFERRY_AMX
// Runs AMX dot products on tiles that stay in registers.
template <bool Bytes>
static inline V sum_on_amx(int chunk, int thread) {
  alignas(64) uint8_t some[kAmxRows * kAmxRowBytes];
  for (size_t i = 0; i < sizeof some; ++i) some[i] = uint8_t(Bytes ? chunk + thread + int(i) : i % 2 ? 0x3c : thread);
  const AmxTiles tiles(kAmxRows, kAmxRowBytes);
  amx_load<4>(some, kAmxRowBytes);
  amx_load<5>(some, kAmxRowBytes);
  amx_load<6>(some, kAmxRowBytes);
  amx_load<7>(some, kAmxRowBytes);
  amx_zero<0>(), amx_zero<1>(), amx_zero<2>(), amx_zero<3>();
  for (int n = 0; n < kSumRounds; ++n) {
    if constexpr (Bytes) {
      amx_dot_int8<0, 4, 6>(), amx_dot_int8<1, 4, 7>(), amx_dot_int8<2, 5, 6>(), amx_dot_int8<3, 5, 7>();
    } else {
      amx_dot_bf16<0, 4, 6>(), amx_dot_bf16<1, 4, 7>(), amx_dot_bf16<2, 5, 6>(), amx_dot_bf16<3, 5, 7>();
    }
  }
  alignas(64) float out[kAmxRows * kPanel];
  amx_store<0>(out, kAmxRowBytes);
  return v_load(out);
}
#endif

// Sums per round: vector lanes, or, with AMX, four tiles of 16 x 16 sums over 16 lanes.
constexpr int kLanes = KVFERRY_AMX ? 4 * 16 * 16 * 16 : kSums * 16;

template <bool Bytes>
class SumJob final : public Job {
 public:
  SumJob(int chunks, int threads) : chunks_(chunks), sums_(size_t(threads) * 16) {}
  int phases() const override { return 1; }
  int chunks(int) const override { return chunks_; }
  void run(int, int chunk, int thread) override {
#if KVFERRY_AMX
    const V sum = sum_on_amx<Bytes>(chunk, thread);
#else
    const V sum = Bytes ? sum_of_bytes(chunk, thread) : sum_of_best(chunk, thread);
#endif
    v_store(&sums_[size_t(thread) * 16], sum);
  }
  double operations() const { return 2.0 * chunks_ * kSumRounds * kLanes * (Bytes ? 4 : KVFERRY_PAIRS ? 2 : 1); }

 private:
  int chunks_;
  std::vector<float> sums_;
};

}  // namespace

static void read_all(Pool& pool, const uint8_t* data, size_t bytes) {
  ReadJob job(data, bytes, pool.threads());
  pool.run(job);
}

template <bool Bytes>
static double sum_all(Pool& pool, int chunks) {
  SumJob<Bytes> job(chunks, pool.threads());
  pool.run(job);
  return job.operations();
}

static double sum_products(Pool& pool, int chunks, bool bytes) {
  return bytes ? sum_all<true>(pool, chunks) : sum_all<false>(pool, chunks);
}

}  // namespace kvferry::KVFERRY_LEVEL
