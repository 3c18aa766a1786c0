// One product by itself, as a job of the pool: for tests and benchmarks. Included once per level, after level.hpp.

namespace {

class ProductJob final : public Job {
 public:
  ProductJob(const Matrix& m, const float* x, int rows, float* out, bool bytes, int threads)
      : matrix_(m), out_(out), num_rows_(rows), cut_(cut_product(m, rows, threads)) {
    const Forms forms = forms_read(m, bytes);
    auto* memory = static_cast<uint8_t*>(inputs_.reserve(Rows::memory_of(rows, m.depth, forms)));
    rows_ = Rows::over(memory, rows, m.depth, forms);
    scratch_bytes_ = (unpacked_bytes(m) + 63) / 64 * 64;
    scratch_ = static_cast<uint8_t*>(scratches_.reserve(scratch_bytes_ * size_t(threads)));
    for (int r = 0; r < rows; ++r) write_input(rows_, r, m.cols, x + size_t(r) * m.cols);
  }
  int phases() const override { return 1; }
  int chunks(int) const override { return cut_.count; }
  void run(int, int chunk, int thread) override {
    product_chunk(matrix_, rows_, num_rows_, cut_, chunk, scratch_ + scratch_bytes_ * size_t(thread), [&](int row, int panel, V v) {
      alignas(64) float lanes[kPanel];
      v_store(lanes, v);
      const int valid = matrix_.rows - panel * kPanel < kPanel ? matrix_.rows - panel * kPanel : kPanel;
      std::memcpy(out_ + size_t(row) * matrix_.rows + size_t(panel) * kPanel, lanes, size_t(valid) * 4);
    });
  }

 private:
  const Matrix& matrix_;
  float* out_;
  int num_rows_;
  Cut cut_;
  Rows rows_;
  Buffer inputs_, scratches_;
  uint8_t* scratch_;
  size_t scratch_bytes_;
};

}  // namespace

static void run_product(Pool& pool, const Matrix& matrix, const float* x, int rows, float* out, bool bytes) {
  ProductJob job(matrix, x, rows, out, bytes, pool.threads());
  pool.run(job);
}
