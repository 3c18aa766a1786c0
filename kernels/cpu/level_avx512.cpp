// The kernels for one level; see level.hpp.
#include <cstring>

#include "step.hpp"

#define KVFERRY_PAIRS 1
#define KVFERRY_AMX 0
#define KVFERRY_LEVEL avx512_bf16
#include "vec_avx512.hpp"

namespace kvferry::avx512_bf16 {
extern const Level kLevel;

#include "kernels.hpp"

const Level kLevel{"avx512_bf16", kTileRows, false, scratch_bytes, forms_read, run_chunk, run_product, read_all, sum_products};
}  // namespace kvferry::avx512_bf16
