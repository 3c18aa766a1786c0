// Vector types of the level for which this translation unit is compiled; vec_portable.hpp documents the names.
#pragma once
#include "simd/target.hpp"

#if KVFERRY_PAIRS
#include "simd/vec_avx512.hpp"
#elif defined(KVFERRY_TARGET_AVX2)
#include "simd/vec_avx2.hpp"
#else
#include "simd/vec_portable.hpp"
#endif
