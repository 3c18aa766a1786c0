// A job for the pool that computes a single product, for tests and benchmarks.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"
#include "data/rows.hpp"
#include "runtime/buffer.hpp"
#include "runtime/pool.hpp"
#include "simd/simd.hpp"
#include "products/blocking.hpp"
#include "products/inputs.hpp"
#include "products/products.hpp"
#include "products/tiles.hpp"
#include "step/level.hpp"
#include "step/step.hpp"

namespace kvferry::KVFERRY_LEVEL {

extern const Level kLevel;  // function table of this level; defined in levels/
namespace {

// Phase 0 prepares the inputs, phase 1 computes the product.
class ProductJob final : public Job {
 public:
  ProductJob(const Matrix& m, const float* x, int rows, float* out, int input_bits, int threads)
      : matrix_(m),
        x_(x),
        out_(out),
        num_rows_(rows),
        blocking_(choose_blocking(kLevel, m, rows, threads)),
        scratch_bytes_((unpacked_bytes(m) + 63) / 64 * 64) {
    // Reused by later products, so that timings do not include allocation.
    static thread_local Buffer inputs, scratches;
    const InputForms forms = input_forms(m, input_bits);
    rows_ = Rows::over(static_cast<uint8_t*>(inputs.reserve(Rows::memory_bytes(rows, m.depth, forms))), rows, m.depth,
                       forms);
    scratch_ = static_cast<uint8_t*>(scratches.reserve(scratch_bytes_ * size_t(threads)));
  }
  int phases() const override { return 2; }
  int chunks(int phase) const override { return phase ? blocking_.count : (num_rows_ + kInputRows - 1) / kInputRows; }
  void run(int phase, int chunk, int thread) override {
    if (phase == 0) {
      const int first = chunk * kInputRows, end = num_rows_ < first + kInputRows ? num_rows_ : first + kInputRows;
      for (int r = first; r < end; ++r) write_input(rows_, r, matrix_.cols, x_ + size_t(r) * matrix_.cols);
      return;
    }
    product_chunk(matrix_, rows_, num_rows_, blocking_, chunk, scratch_ + scratch_bytes_ * size_t(thread), nullptr,
                  [to = out_, n = matrix_.rows](const Tile& tile) { store_tile(tile, to, size_t(n), n); });
  }

 private:
  static constexpr int kInputRows = 16;  // per chunk

  const Matrix& matrix_;
  const float* x_;
  float* out_;
  int num_rows_;
  Blocking blocking_;
  Rows rows_;
  uint8_t* scratch_;
  size_t scratch_bytes_;
};

}  // namespace

static void run_product(Pool& pool, const Matrix& matrix, const float* x, int rows, float* out, int input_bits) {
  ProductJob job(matrix, x, rows, out, input_bits, pool.threads());
  pool.run(job);
}

}  // namespace kvferry::KVFERRY_LEVEL
