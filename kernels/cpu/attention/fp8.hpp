// Conversions of fp8: e4m3, with a sign, 4 bits of exponent (bias 7), 3 bits of fraction, and no infinities.
#pragma once
#include <cstdint>
#include <cstring>

#include "simd/simd.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Rounds 16 values of magnitude up to 448 to the nearest codes, ties to even. NaN becomes 448; its scale is NaN.
static inline void store_fp8(uint8_t* to, V values) {
  constexpr float kSubnormalStep = 0x1p-9f, kOneStepInUlps = 0x1p14f;  // the last place of 2^14 is a step of 2^-9
  alignas(64) float x[16];
  alignas(64) uint32_t bits[16], codes[16];
  v_store(x, values);
  std::memcpy(bits, x, sizeof bits);
  for (int i = 0; i < 16; ++i) {
    const uint32_t magnitude = bits[i] & 0x7fffffffu;
    float size, shifted;
    std::memcpy(&size, &magnitude, 4);
    shifted = size + kOneStepInUlps;  // rounds to a multiple of the step of subnormal codes
    uint32_t steps;
    std::memcpy(&steps, &shifted, 4);
    const uint32_t rounded = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    const uint32_t code = size < 8 * kSubnormalStep ? steps & 0xfu : rounded;
    codes[i] = (code < 0x7eu ? code : 0x7eu) | (bits[i] >> 24 & 0x80u);
  }
  for (int i = 0; i < 16; ++i) to[i] = uint8_t(codes[i]);
}

// Widens n codes, a multiple of 16, to bfloat16, in which they are exact. The code of NaN becomes 480.
static inline void widen_fp8(const uint8_t* from, uint16_t* to, int n) {
  for (int i = 0; i < n; ++i) {
    const uint32_t code = from[i], magnitude = code & 0x7fu;
    // A subnormal code is read as a number with the implicit one, which is then subtracted.
    const uint32_t bits = (magnitude << 20) + ((magnitude < 8 ? 121u : 120u) << 23);
    float value;
    std::memcpy(&value, &bits, 4);
    value -= magnitude < 8 ? 0x1p-6f : 0.0f;
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    to[i] = uint16_t(wide >> 16 | (code & 0x80u) << 8);
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
