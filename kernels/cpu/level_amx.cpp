// The kernels for one level; see level.hpp.
#include <cstring>
#include <utility>

#include "step.hpp"

#define KVFERRY_PAIRS 1
#define KVFERRY_AMX 1
#define KVFERRY_LEVEL amx_bf16
#include "vec_avx512.hpp"

namespace kvferry::amx_bf16 {
extern const Level kLevel;

#include "kernels.hpp"

const Level kLevel{"amx_bf16", 2 * kTileTall, true, scratch_bytes, forms_read, run_chunk, run_product, read_all, sum_products};
}  // namespace kvferry::amx_bf16
