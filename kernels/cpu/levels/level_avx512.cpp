// Phases of a step compiled for AVX-512 with BF16 and VNNI.
#define KVFERRY_TARGET_AVX512_BF16
#include "step/phases.hpp"

#include "products/inputs.hpp"
#include "products/tiles.hpp"
#include "step/level.hpp"
#include "bench/product_job.hpp"
#include "bench/roofline.hpp"

namespace kvferry::avx512_bf16 {

const Level kLevel{"avx512_bf16", kTileRows,   false,           scratch_bytes, input_forms,
                   run_chunk,     run_product, dequantize_rows, read_all,      sum_products};

}  // namespace kvferry::avx512_bf16
