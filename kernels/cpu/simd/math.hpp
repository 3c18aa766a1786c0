// Vector math: the exponential function, and the scale of symmetric quantization.
#pragma once
#include "simd/simd.hpp"

namespace kvferry::KVFERRY_LEVEL {

constexpr float kLog2E = 1.44269504088896341f;

static inline V v_exp(V x) {
  // e^x = 2^n * e^r, |r| <= ln(2) / 2, polynomial of degree 6 (Cephes, expf). The result is 0 below -87, where floats
  // underflow. The argument is clamped to 88, because 2^n overflows beyond it. NaN stays NaN.
  const V within = v_max(v_set(-88.0f), v_min(v_set(88.0f), x));
  const V n = v_round(v_mul(within, v_set(kLog2E)));
  V r = v_fma(n, v_set(-0.693359375f), within);
  r = v_fma(n, v_set(2.12194440e-4f), r);
  V y = v_set(1.9875691500e-4f);
  y = v_fma(y, r, v_set(1.3981999507e-3f));
  y = v_fma(y, r, v_set(8.3334519073e-3f));
  y = v_fma(y, r, v_set(4.1665795894e-2f));
  y = v_fma(y, r, v_set(1.6666665459e-1f));
  y = v_fma(y, r, v_set(5.0000001201e-1f));
  y = v_fma(y, v_mul(r, r), v_add(r, v_set(1.0f)));
  return v_zero_below(v_mul(y, v_exp2i(n)), x, -87.0f);
}

// cap * tanh(x / cap), with an error of at most 2e-7 times the cap.
static inline V v_soft_cap(V x, float cap) {
  const V e = v_exp(v_mul(x, v_set(2.0f / cap)));
  return v_fma(v_div(v_set(1.0f), v_add(e, v_set(1.0f))), v_set(-2.0f * cap), v_set(cap));
}

// Returns the scale for quantizing n values symmetrically to integers of magnitude <= `max_code`; `inverse` converts
// values to integers. The scale is NaN if a value is not finite. Tiny magnitudes have no finite inverse and are
// quantized to zero.
static inline float quantization_scale(const float* x, int n, float max_code, float& inverse) {
  V top = v_zero(), poison = v_zero();
  for (int i = 0; i < n; i += 16) {
    const V v = v_load(x + i);
    top = v_max(top, v_max(v, v_sub(v_zero(), v)));
    poison = v_fma(v, v_zero(), poison);
  }
  const float highest = v_reduce_max(top);
  inverse = highest > 1e-30f ? max_code / highest : 0.0f;
  return highest / max_code + v_reduce_add(poison);
}

}  // namespace kvferry::KVFERRY_LEVEL
