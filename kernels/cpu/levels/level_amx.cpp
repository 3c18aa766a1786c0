// Phases of a step compiled for AVX-512 and AMX.
#define KVFERRY_TARGET_AMX_BF16
#include "step/phases.hpp"

#include "simd/amx.hpp"
#include "products/inputs.hpp"
#include "products/tiles.hpp"
#include "step/level.hpp"
#include "bench/product_job.hpp"
#include "bench/roofline.hpp"

namespace kvferry::amx_bf16 {

const Level kLevel{"amx_bf16",  2 * kAmxRows,    true,     scratch_bytes, input_forms, run_chunk,
                   run_product, dequantize_rows, read_all, sum_products};

}  // namespace kvferry::amx_bf16
