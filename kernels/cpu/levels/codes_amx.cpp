// Products of quantized matrices compiled for AVX-512 and AMX.
#define KVFERRY_TARGET_AMX_BF16
#include "products/amx_codes.hpp"
