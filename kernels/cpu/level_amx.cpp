// The kernels for one level; see level.hpp.
#include <cstring>

#include "step.hpp"
#define KVFERRY_LEVEL amx_bf16
#include "vec_avx512.hpp"

#define KVFERRY_PAIRS 1
#define KVFERRY_AMX 1

namespace kvferry::amx_bf16 {
#include "kernels.hpp"

extern const Level kLevel;
const Level kLevel{"amx_bf16", scratch_bytes, forms_read, run_chunk, run_product, read_all, sum_products};
}  // namespace kvferry::amx_bf16
