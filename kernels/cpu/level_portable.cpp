// The kernels for one level; see level.hpp.
#include <cstring>

#include "step.hpp"
#include "vec_portable.hpp"

#define KVFERRY_PAIRS 0
#define KVFERRY_AMX 0

namespace kvferry::portable {
extern const Level kLevel;

#include "kernels.hpp"

const Level kLevel{"portable", kTileRows, false, scratch_bytes, forms_read, run_chunk, run_product, read_all, sum_products};
}  // namespace kvferry::portable
