// Which instruction sets the machine that runs (not the one that built) offers.
#include "isa.hpp"

namespace kvferry {

std::vector<std::string> supported_isas() {
  std::vector<std::string> names{"portable"};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) names.emplace_back("avx2");
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    names.emplace_back("avx512");
  if (__builtin_cpu_supports("avx512bf16")) names.emplace_back("avx512_bf16");
  if (__builtin_cpu_supports("avx512vnni")) names.emplace_back("avx512_vnni");
#endif
  return names;
}

}  // namespace kvferry
