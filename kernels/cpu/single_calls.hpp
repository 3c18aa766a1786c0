// Calls of single kernels: a product, rows of a matrix, and the machine's bounds.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "data/batch_checks.hpp"
#include "data/matrix.hpp"
#include "runtime/pool.hpp"
#include "step/level.hpp"
#include "levels/levels.hpp"
#include "bindings.hpp"

namespace kvferry {

inline bool is_width(int input_bits) { return input_bits == 8 || input_bits == 16 || input_bits == 32; }

inline const Level& usable(const std::string& level) {
  const Level* found = level_named(level);
  require(found != nullptr, "this machine does not support level " + level);
  return *found;
}

inline void product(Pool& pool, const std::string& level, const PackedMatrix& packed, Floats x, Array<float> out,
                    int input_bits) {
  const Matrix& m = packed.matrix;
  const Level& found = usable(level);
  require(m.data != nullptr, "the matrix has no data");
  require(is_width(input_bits), "input_bits must be 8, 16 or 32");
  require(x.ndim() == 2 && x.shape(1) == size_t(m.cols), "the inputs have the wrong width");
  require(out.ndim() == 2 && out.shape(0) == x.shape(0) && out.shape(1) == size_t(m.rows),
          "the outputs have the wrong shape");
  const int rows = int(x.shape(0));
  nb::gil_scoped_release released;
  if (rows) found.product(pool, m, x.data(), rows, out.data(), input_bits);
}

inline void dequantize(const std::string& level, const PackedMatrix& packed, Ints rows, Array<float> out) {
  const Matrix& m = packed.matrix;
  const Level& found = usable(level);
  require(m.data != nullptr, "the matrix has no data");
  require(out.size() == rows.size() * size_t(m.cols), "the outputs have the wrong size");
  check_indices(rows.data(), rows.size(), 0, m.rows, "a row does not exist");
  nb::gil_scoped_release released;
  found.dequantize(m, rows.data(), int(rows.size()), out.data());
}

inline void read_all(Pool& pool, const std::string& level, Array<const uint8_t> data) {
  const Level& found = usable(level);
  nb::gil_scoped_release released;
  found.read(pool, data.data(), data.size());
}

inline double sum_products(Pool& pool, const std::string& level, int chunks, bool bytes) {
  const Level& found = usable(level);
  nb::gil_scoped_release released;
  return found.sum_products(pool, chunks, bytes);
}

}  // namespace kvferry
