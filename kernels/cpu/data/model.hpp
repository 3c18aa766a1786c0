// A model: packed weight matrices, norm weights and RoPE tables.
#pragma once
#include "data/matrix.hpp"

namespace kvferry {

struct Layer {
  const float* attention_norm = nullptr;  // [hidden]
  Matrix qkv;                             // rows: query heads, key heads, value heads
  const float* q_norm = nullptr;          // [head_dim] or null
  const float* k_norm = nullptr;
  Matrix output;
  const float* mlp_norm = nullptr;
  Matrix gate_up;  // panels alternate: 16 gate outputs, then the 16 corresponding up outputs
  Matrix down;
};

struct Model {
  int hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0, vocabulary = 0, max_tokens = 0;
  float epsilon = 0.0f;
  float scale = 0.0f;  // factor of attention scores
  Matrix embedding;    // [vocabulary, hidden]; one row is dequantized per token
  Matrix head;         // shares its data with `embedding` if the weights are tied
  const float* final_norm = nullptr;
  const float* cos = nullptr;  // [max_tokens, head_dim]
  const float* sin = nullptr;  // [max_tokens, head_dim]; the first half is negated
  const Layer* layers = nullptr;
  int num_layers = 0;
  int input_bits = 16;  // input precision for quantized matrices: 8, 16 (bfloat16 on levels with bf16 dot products), 32
};

}  // namespace kvferry
