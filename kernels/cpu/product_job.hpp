// One product by itself, as a job of the pool: for tests and benchmarks. Included once per level, after level.hpp.

namespace {

// Inputs in the forms that the matrix reads, then the product.
class ProductJob final : public Job {
 public:
  ProductJob(const Matrix& m, const float* x, int rows, float* out, int input_bits, int threads)
      : matrix_(m), x_(x), out_(out), num_rows_(rows), cut_(cut_product(kLevel, m, rows, threads)), scratch_bytes_((unpacked_bytes(m) + 63) / 64 * 64) {
    // Kept for the next product, so that it is timed without the making of memory.
    static thread_local Buffer inputs, scratches;
    const Forms forms = forms_read(m, input_bits);
    rows_ = Rows::over(static_cast<uint8_t*>(inputs.reserve(Rows::memory_of(rows, m.depth, forms))), rows, m.depth, forms);
    scratch_ = static_cast<uint8_t*>(scratches.reserve(scratch_bytes_ * size_t(threads)));
  }
  int phases() const override { return 2; }
  int chunks(int phase) const override { return phase ? cut_.count : (num_rows_ + kInputRows - 1) / kInputRows; }
  void run(int phase, int chunk, int thread) override {
    if (phase == 0) {
      const int first = chunk * kInputRows, end = num_rows_ < first + kInputRows ? num_rows_ : first + kInputRows;
      for (int r = first; r < end; ++r) write_input(rows_, r, matrix_.cols, x_ + size_t(r) * matrix_.cols);
      return;
    }
    product_chunk(matrix_, rows_, num_rows_, cut_, chunk, scratch_ + scratch_bytes_ * size_t(thread),
                  [to = out_, n = matrix_.rows](const Tile& tile) { put_tile(tile, to, size_t(n), n); });
  }

 private:
  static constexpr int kInputRows = 16;  // of a chunk

  const Matrix& matrix_;
  const float* x_;
  float* out_;
  int num_rows_;
  Cut cut_;
  Rows rows_;
  uint8_t* scratch_;
  size_t scratch_bytes_;
};

}  // namespace

static void run_product(Pool& pool, const Matrix& matrix, const float* x, int rows, float* out, int input_bits) {
  ProductJob job(matrix, x, rows, out, input_bits, pool.threads());
  pool.run(job);
}
