// Matrix products compiled for AVX-512 with BF16 and VNNI.
#define KVFERRY_TARGET_AVX512_BF16
#include "products/dispatch.hpp"
