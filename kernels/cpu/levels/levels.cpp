#include "levels/levels.hpp"

#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvferry {

// CMakeLists.txt defines KVFERRY_HAS_* for the levels that are built.
namespace portable { extern const Level kLevel; }
namespace avx2 { extern const Level kLevel; }
namespace avx512_bf16 { extern const Level kLevel; }
namespace amx_bf16 { extern const Level kLevel; }

#if defined(KVFERRY_HAS_AMX) && defined(__linux__)
// Whether the CPU has AMX with bf16 and int8, and the operating system allows this process to use tile state (Linux:
// Documentation/arch/x86/xstate.rst).
static bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned wanted = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  constexpr int ask = 0x1023, tiles = 18;                      // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return (d & wanted) == wanted && syscall(SYS_arch_prctl, ask, tiles) == 0;
}
#endif

std::vector<const Level*> usable_levels() {
  std::vector<const Level*> levels;
#ifdef KVFERRY_HAS_PORTABLE
  levels.push_back(&portable::kLevel);
#endif
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
    return levels;
#ifdef KVFERRY_HAS_AVX2
  levels.push_back(&avx2::kLevel);
#endif
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512vnni"))
    return levels;
#ifdef KVFERRY_HAS_AVX512
  levels.push_back(&avx512_bf16::kLevel);
#endif
#if defined(KVFERRY_HAS_AMX) && defined(__linux__)
  if (has_amx()) levels.push_back(&amx_bf16::kLevel);
#endif
#endif
  return levels;
}

const Level* level_named(const std::string& name) {
  for (const Level* level : usable_levels())
    if (name == level->name) return level;
  return nullptr;
}

}  // namespace kvferry
