// Matrix products compiled for AVX2, FMA and F16C.
#define KVFERRY_TARGET_AVX2
#include "products/dispatch.hpp"
