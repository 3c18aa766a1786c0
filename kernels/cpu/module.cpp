// Python bindings of the compiled kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "data/matrix.hpp"
#include "runtime/pool.hpp"
#include "runtime/ranks.hpp"
#include "weights/pack.hpp"
#include "step/level.hpp"
#include "step/step.hpp"
#include "levels/levels.hpp"
#include "bindings.hpp"
#include "runner.hpp"
#include "single_calls.hpp"

using namespace nb::literals;

namespace kvferry {
namespace {

std::vector<std::string> level_names() {
  std::vector<std::string> names;
  for (const Level* level : usable_levels()) names.emplace_back(level->name);
  return names;
}

}  // namespace
}  // namespace kvferry

NB_MODULE(_cpu, m) {
  using namespace kvferry;
  nb::set_leak_warnings(false);  // objects that live until the interpreter exits are not leaks
  m.doc() = "Compiled CPU kernels of kvferry; kvferry.kernels is the only importer.";
  m.def("levels", &level_names,
        "Instruction sets that the kernels are compiled for and this machine supports, slowest first.");
  nb::class_<Pool>(m, "Pool").def(nb::init<int>(), "threads"_a).def_prop_ro("threads", &Pool::threads);
  nb::class_<SharedRanks>(m, "Ranks")
      .def(nb::init<Bytes, int, int, size_t, double>(), "memory"_a.noconvert(), "rank"_a, "size"_a, "part_floats"_a,
           "seconds"_a)
      .def_static("bytes", &Ranks::bytes, "size"_a, "part_floats"_a)
      .def_static(
          "row_floats", [](int hidden) { return row_floats(hidden); }, "hidden"_a)
      .def(
          "fail", [](SharedRanks& shared, int rank) { shared.ranks.fail(rank); }, "rank"_a)
      .def_prop_ro("missing", [](const SharedRanks& shared) { return shared.ranks.missing(); });
  nb::class_<PackedMatrix>(m, "Matrix")
      .def(
          "__init__",
          [](PackedMatrix* self, const std::string& wanted, const std::vector<int>& types, int rows, int cols) {
            new (self) PackedMatrix(make_matrix(wanted, types, rows, cols));
          },
          "wanted"_a, "types"_a, "rows"_a, "cols"_a)
      .def_prop_ro("num_bytes", &PackedMatrix::bytes)
      .def_prop_ro("rows", [](const PackedMatrix& p) { return p.matrix.rows; })
      .def_prop_ro("cols", [](const PackedMatrix& p) { return p.matrix.cols; })
      .def_prop_ro("padded_rows", [](const PackedMatrix& p) { return p.matrix.panels * kPanel; })
      .def_prop_ro("format",
                   [](const PackedMatrix& p) {
                     const char* names[] = {"f32", "f16", "bf16", "codes4", "codes8", "codes4-table", "codes6"};
                     return std::string(names[int(p.matrix.format)]);
                   })
      .def("pack", &pack_matrix, "types"_a, "parts"_a, "order"_a, "out"_a.noconvert())
      .def("attach", &attach, "data"_a, "bias"_a = nb::none());
  nb::class_<PackedAdapter>(m, "Adapter");
  nb::class_<Runner>(m, "Runner")
      .def(nb::init<nb::dict, nb::dict, nb::list, const std::string&, Pool&, SharedRanks*>(), "shape"_a, "parts"_a,
           "layers"_a, "level"_a, "pool"_a, "ranks"_a.none() = nb::none(), nb::keep_alive<1, 6>(),
           nb::keep_alive<1, 7>())
      .def("adapter", &Runner::adapter, "layers"_a, "is_bf16"_a)
      .def("phase_seconds", &Runner::phase_seconds)
      .def("step", &Runner::step, "tokens"_a, "positions"_a, "slots"_a, "queries"_a, "contexts"_a, "tables"_a,
           "sampled"_a, "pages"_a, "num_pages"_a, "block_tokens"_a, "kv_type"_a, "logits"_a.noconvert(),
           "greedy"_a.noconvert(), "finite"_a.noconvert(), "shown"_a, "hidden"_a.noconvert(), "adapter_of_row"_a,
           "adapters"_a, "taps"_a, "tapped"_a.noconvert(), "residuals"_a, "inputs"_a, "places"_a, "page_layers"_a,
           "further_slots"_a, "further_tables"_a, "trees"_a, "paths"_a);
  m.def("product", &product, "pool"_a, "level"_a, "matrix"_a, "x"_a, "out"_a.noconvert(), "input_bits"_a = 16,
        "Computes out = x [rows, cols] times the matrix. For quantized matrices, x is rounded to 8 or 16 bits, or read "
        "as float32, according to input_bits.");
  m.def("dequantize", &dequantize, "level"_a, "matrix"_a, "rows"_a, "out"_a.noconvert(),
        "Dequantizes rows of a matrix into out [rows, cols].");
  m.def("read_all", &read_all, "pool"_a, "level"_a, "data"_a,
        "Streams an array, to measure the bound set by memory bandwidth.");
  m.def("sum_products", &sum_products, "pool"_a, "level"_a, "chunks"_a, "of_bytes"_a = false,
        "Runs multiply-adds in registers and returns the number of operations.");
  m.def("row_bytes", [](int type, int cols) { return row_bytes(RowType(type), cols); }, "type_id"_a, "cols"_a);
}
