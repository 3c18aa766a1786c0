// AMX instructions (Intel's matrix unit). This header is empty on levels without AMX.
#pragma once
#include <cstddef>
#include <cstdint>

#include "simd/target.hpp"

#if KVFERRY_AMX
namespace kvferry::KVFERRY_LEVEL {

constexpr int kAmxRows = 16;      // rows of a tile register
constexpr int kAmxRowBytes = 64;  // bytes per row of a tile register

// Tile registers: accumulators 0 to 3, inputs 4 and 5, weights 6 and 7. Inline assembly, because the intrinsics need
// -mamx flags and do not declare the memory that they read.
template <int Tile>
[[gnu::always_inline]] static inline void amx_load(const void* p, size_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
// Loads a tile with a streaming hint, for data without reuse, so that it does not evict weights from the L1 cache.
template <int Tile>
[[gnu::always_inline]] static inline void amx_load_stream(const void* p, size_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
[[gnu::always_inline]] static inline void amx_store(void* p, size_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
[[gnu::always_inline]] static inline void amx_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
// sum += products of bf16 pairs.
template <int Sum, int Inputs, int Weights>
[[gnu::always_inline]] static inline void amx_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Inputs), "i"(Weights));
}
// sum += products of int8 quads, in int32.
template <int Sum, int Inputs, int Weights>
[[gnu::always_inline]] static inline void amx_dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(Inputs), "i"(Weights));
}

// Configures this thread's tile registers for `rows` rows of inputs with `bytes` bytes each, and releases them at scope
// exit, so that context switches do not save 8 KB of tile state.
class AmxTiles {
 public:
  AmxTiles(int rows, int bytes) {
    struct [[gnu::packed]] {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.bytes[tile] = uint16_t(tile == 4 || tile == 5 ? bytes : kAmxRowBytes);
      shape.rows[tile] = uint8_t(tile < 6 ? rows : bytes / 4);
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
  }
  ~AmxTiles() { asm volatile("tilerelease"); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

}  // namespace kvferry::KVFERRY_LEVEL
#endif
