// Masks of scores: tokens that a row does not attend to.
#pragma once
#include "simd/simd.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Mask for a partial group: a load from kTailMask + 16 - n is 0 in the first n lanes and kMaskedScore in the others.
// The mask is finite, so that no intermediate result is NaN.
constexpr float kMaskedScore = -1e30f;
alignas(64) static const float kTailMask[32] = {0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                0,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore,
                                                kMaskedScore};

// Replaces the first `count` scores.
static inline void hide_first(float* scores, int count, float by) {
  int i = 0;
  for (; i + 16 <= count; i += 16) v_store(scores + i, v_set(by));
  for (; i < count; ++i) scores[i] = by;
}

}  // namespace kvferry::KVFERRY_LEVEL
