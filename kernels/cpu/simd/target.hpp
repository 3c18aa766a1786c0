// Selects the level for which this translation unit is compiled. The translation unit defines a macro before its first
// include: KVFERRY_TARGET_AVX2, KVFERRY_TARGET_AVX512_BF16 or KVFERRY_TARGET_AMX_BF16. Without a macro, the level is
// portable.
//
//   KVFERRY_LEVEL  namespace of all code of the level; two levels must never define the same symbol
//   KVFERRY_PAIRS  1 if the level has dot products of bf16 pairs
//   KVFERRY_AMX    1 if the level has AMX
#pragma once

#if defined(KVFERRY_TARGET_AMX_BF16)
#define KVFERRY_LEVEL amx_bf16
#define KVFERRY_PAIRS 1
#define KVFERRY_AMX 1
#elif defined(KVFERRY_TARGET_AVX512_BF16)
#define KVFERRY_LEVEL avx512_bf16
#define KVFERRY_PAIRS 1
#define KVFERRY_AMX 0
#elif defined(KVFERRY_TARGET_AVX2)
#define KVFERRY_LEVEL avx2
#define KVFERRY_PAIRS 0
#define KVFERRY_AMX 0
#else
#define KVFERRY_LEVEL portable
#define KVFERRY_PAIRS 0
#define KVFERRY_AMX 0
#endif
