// Element types of the KV cache and their sizes in a page.
#pragma once
#include <cstddef>

namespace kvferry {

// Element type of keys and values in a page. With int8 and fp8 (e4m3), a head's quantized values q in the page are
// followed by one float scale per token; value = q * scale.
enum class KvType : int { f32, bf16, int8, fp8 };
constexpr int kScaleBytes = 4;
constexpr float kMaxCode = 127.0f, kMaxFp8 = 448.0f;
constexpr bool has_scales(KvType type) { return type == KvType::int8 || type == KvType::fp8; }

constexpr size_t item_bytes(KvType type) { return type == KvType::f32 ? 4 : type == KvType::bf16 ? 2 : 1; }

// Bytes of a head's keys (or values) in a page.
constexpr size_t head_bytes(KvType type, int block_tokens, int head_dim) {
  return size_t(block_tokens) * (size_t(head_dim) * item_bytes(type) + (has_scales(type) ? kScaleBytes : 0));
}

}  // namespace kvferry
