// The kernels for one level; see level.hpp.
#include <cstring>

#include "step.hpp"
#include "vec_avx2.hpp"

#define KVFERRY_PAIRS 0
#define KVFERRY_AMX 0

namespace kvferry::avx2 {
extern const Level kLevel;

#include "kernels.hpp"

const Level kLevel{"avx2", kTileRows, false, scratch_bytes, forms_read, run_chunk, run_product, read_all, sum_products};
}  // namespace kvferry::avx2
