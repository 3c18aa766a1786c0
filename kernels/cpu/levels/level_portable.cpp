// Phases of a step compiled for the baseline of the architecture.
#include "step/phases.hpp"

#include "products/inputs.hpp"
#include "products/tiles.hpp"
#include "step/level.hpp"
#include "bench/product_job.hpp"
#include "bench/roofline.hpp"

namespace kvferry::portable {

const Level kLevel{"portable", kTileRows,   false,           scratch_bytes, input_forms,
                   run_chunk,  run_product, dequantize_rows, read_all,      sum_products};

}  // namespace kvferry::portable
