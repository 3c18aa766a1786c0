// Arrays and packed matrices whose memory Python owns.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "data/matrix.hpp"
#include "weights/pack.hpp"

namespace nb = nanobind;

namespace kvferry {

template <class T>
using Array = nb::ndarray<T, nb::numpy, nb::c_contig, nb::device::cpu>;
using Bytes = Array<uint8_t>;
using Ints = Array<const int64_t>;
using Floats = Array<const float>;

inline void require(bool holds, const std::string& what) {
  if (!holds) throw nb::value_error(what.c_str());
}

// Casts to an array without conversion: a converted copy would be freed while the kernels still point to it.
template <class A>
A exactly(nb::handle from, const char* what) {
  A array;
  if (!nb::try_cast<A>(from, array, false))
    throw nb::type_error((std::string(what) + " must be a contiguous numpy array of the right type").c_str());
  return array;
}

inline std::vector<RowType> row_types(const std::vector<int>& types) {
  std::vector<RowType> found;
  for (int type : types) found.push_back(RowType(type));
  return found;
}

// A matrix whose memory Python owns.
struct PackedMatrix {
  Matrix matrix;
  std::vector<nb::object> owners;

  size_t bytes() const { return matrix.panel_bytes * size_t(matrix.panels); }
};

inline PackedMatrix make_matrix(const std::string& wanted, const std::vector<int>& types, int rows, int cols) {
  require(rows > 0 && cols > 0 && !types.empty(), "a matrix needs rows, columns and types");
  for (RowType type : row_types(types))
    require(row_bytes(type, cols) > 0, "the number of columns must be a multiple of the type's block");
  return {packed_layout(wanted, row_types(types), rows, cols), {}};
}

inline void pack_matrix(PackedMatrix& packed, const std::vector<int>& types,
                        const std::vector<Array<const uint8_t>>& parts, Ints order, Bytes out) {
  const Matrix& m = packed.matrix;
  require(types.size() == parts.size(), "each part needs a type");
  require(order.size() == size_t(m.rows), "the order must have one entry per row");
  require(out.size() == packed.bytes(), "the packed matrix has the wrong size");
  std::vector<Part> list;
  int64_t total = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const size_t bytes = row_bytes(RowType(types[i]), m.cols);
    require(bytes > 0 && parts[i].size() % bytes == 0, "a part must be a whole number of rows");
    list.push_back({RowType(types[i]), parts[i].data(), int(parts[i].size() / bytes)});
    total += list.back().rows;
  }
  for (size_t r = 0; r < order.size(); ++r)
    require(order.data()[r] >= -1 && order.data()[r] < total, "the order names a row that does not exist");
  nb::gil_scoped_release released;
  pack(m, list, order.data(), out.data());
}

inline void attach(PackedMatrix& packed, nb::object data, nb::object bias) {
  require(packed.matrix.data == nullptr, "the matrix already has its data");
  const auto bytes = exactly<Array<const uint8_t>>(data, "packed data");
  require(bytes.size() == packed.bytes(), "the packed matrix has the wrong size");
  const float* values = nullptr;
  if (!bias.is_none()) {
    const auto given = exactly<Floats>(bias, "a bias");
    require(given.size() == size_t(packed.matrix.panels) * kPanel, "a bias needs a value for every padded row");
    values = given.data();
  }
  packed.matrix.data = bytes.data();
  packed.matrix.has_one_scale = has_one_scale(packed.matrix);
  packed.matrix.bias = values;
  packed.owners = {data, bias};
}

}  // namespace kvferry
