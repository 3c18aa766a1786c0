// The door between Python and the compiled CPU kernels. Each op gets one line here and its own file beside.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.hpp"

NB_MODULE(_cpu, m) {
  m.doc() = "Compiled CPU kernels of kvferry; kvferry.kernels is the only importer.";
  m.def("supported_isas", &kvferry::supported_isas,
        "Instruction sets this machine runs, weakest first: portable, avx2, avx512, avx512_bf16, avx512_vnni.");
}
