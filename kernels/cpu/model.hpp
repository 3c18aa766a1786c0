// What a step reads: packed matrices, a model made of them, and one step's batch. Plain data, shared by every level.
#pragma once
#include <cstddef>
#include <cstdint>

namespace kvferry {

constexpr int kPanel = 16;     // outputs that stand side by side in a packed matrix
constexpr int kGroup = 32;     // inputs are padded to a multiple of this
constexpr int kSumWidth = 16;  // inputs whose sum is kept, for formats with a minimum

// Where the pairs of neighbours of 8 inputs stand in codes4, from the lowest nibbles on: 0 2 1 3. Nibbles two apart are
// the two pairs of a quad, so that one mask takes a quad out of a word pair, and one shift a pair.
constexpr int nibble_of_pair(int pair) { return pair == 1 ? 2 : pair == 2 ? 1 : pair; }

enum class Format : int { f32 = 0, f16 = 1, bf16 = 2, codes4 = 3, codes8 = 4 };

// [panel][...] with the inputs of 16 outputs together; see pack.cpp for the order within a panel.
struct Matrix {
  Format format = Format::f32;
  int rows = 0;         // outputs
  int cols = 0;         // inputs
  int panels = 0;       // rows / 16, rounded up; the last is filled with zeros
  int depth = 0;        // cols rounded up to kGroup; filled with zeros
  int block = 0;        // inputs that share a scale: 16 or 32; codes only
  bool half_scales = false;  // scales and minima are float16, else float32
  bool has_min = false;      // value = scale * code + minimum, else scale * (code + offset)
  float offset = 0.0f;
  size_t panel_bytes = 0;
  const uint8_t* data = nullptr;
  const float* bias = nullptr;  // [panels * 16], or none

  int code_bytes() const { return format == Format::codes4 ? block * 8 : block * 16; }
  int scale_bytes() const { return half_scales ? 32 : 64; }
  int block_bytes() const { return code_bytes() + scale_bytes() * (has_min ? 2 : 1); }
  bool has_codes() const { return format == Format::codes4 || format == Format::codes8; }
};

struct Layer {
  const float* attention_norm = nullptr;  // [hidden]
  Matrix qkv;                             // rows: queries of all heads, keys, values
  const float* q_norm = nullptr;          // [head_dim], or none
  const float* k_norm = nullptr;
  Matrix output;
  const float* mlp_norm = nullptr;
  Matrix gate_up;  // panels alternate: 16 gates, the same 16 ups
  Matrix down;
};

struct Model {
  int hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0, vocabulary = 0, max_tokens = 0;
  float epsilon = 0.0f;
  float scale = 0.0f;               // of attention scores
  Matrix embedding;                 // [vocabulary, hidden]; looked up row by row
  Matrix head;                      // the same data where they are tied
  const float* final_norm = nullptr;
  const float* cos = nullptr;       // [max_tokens, head_dim]
  const float* sin = nullptr;       // first half negated
  const Layer* layers = nullptr;
  int num_layers = 0;
  int input_bits = 16;              // of the inputs of matrices of codes: 8; 16, on a level with pairs as bfloat16; 32
};

struct Sequence {
  int first;    // its first row
  int queries;  // rows of this step
  int context;  // tokens in pages after this step's writes
  const int64_t* pages;  // page of each block
};

// What pages hold. int8: codes, and after those of a head's tokens in a page a scale of each token, code * scale its value.
enum class KvType : int { f32, bf16, int8 };
constexpr int kScaleBytes = 4;
constexpr float kMostCode = 127.0f;

constexpr size_t item_bytes(KvType type) { return type == KvType::f32 ? 4 : type == KvType::bf16 ? 2 : 1; }

// Of the keys, or the values, of one head in a page.
constexpr size_t head_bytes(KvType type, int block_tokens, int head_dim) {
  return size_t(block_tokens) * (size_t(head_dim) * item_bytes(type) + (type == KvType::int8 ? kScaleBytes : 0));
}

struct Batch {
  int rows = 0;
  const int64_t* tokens = nullptr;     // [rows]
  const int64_t* positions = nullptr;  // [rows]
  const int64_t* slots = nullptr;      // [rows]: page * block_tokens + place
  const Sequence* sequences = nullptr;
  int num_sequences = 0;
  const int64_t* sampled = nullptr;  // [num_sampled] rows whose logits are wanted
  int num_sampled = 0;
  uint8_t* pages = nullptr;  // [pages][layers][2][kv_heads], each `head_bytes`: [block_tokens][head_dim]
  KvType kv_type = KvType::f32;
  int block_tokens = 0;
  float* logits = nullptr;     // [num_sampled, vocabulary]
  int64_t* greedy = nullptr;   // [num_sampled] the first of the highest
  uint8_t* finite = nullptr;   // [num_sampled] whether all of a row's logits are finite
};

}  // namespace kvferry
