// Which levels this build and this machine have.
#include "levels.hpp"

#include <cstring>

namespace kvferry {

namespace portable { extern const Level kLevel; }
#if defined(__x86_64__)
namespace avx2 { extern const Level kLevel; }
namespace avx512_bf16 { extern const Level kLevel; }
#endif

std::vector<const Level*> usable_levels() {
  std::vector<const Level*> levels{&portable::kLevel};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    levels.push_back(&avx2::kLevel);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") &&
        __builtin_cpu_supports("avx512vnni"))
      levels.push_back(&avx512_bf16::kLevel);
  }
#endif
  return levels;
}

const Level* level_named(const std::string& name) {
  for (const Level* level : usable_levels())
    if (name == level->name) return level;
  return nullptr;
}

}  // namespace kvferry
