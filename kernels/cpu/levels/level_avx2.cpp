// Phases of a step compiled for AVX2, FMA and F16C.
#define KVFERRY_TARGET_AVX2
#include "step/phases.hpp"

#include "products/inputs.hpp"
#include "products/tiles.hpp"
#include "step/level.hpp"
#include "bench/product_job.hpp"
#include "bench/roofline.hpp"

namespace kvferry::avx2 {

const Level kLevel{"avx2",    kTileRows,   false,           scratch_bytes, input_forms,
                   run_chunk, run_product, dequantize_rows, read_all,      sum_products};

}  // namespace kvferry::avx2
