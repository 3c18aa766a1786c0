// A model: packed weight matrices, norm weights and RoPE tables.
#pragma once
#include "data/matrix.hpp"

namespace kvferry {

// Function of the gate and up values g and u: SiLU(g) u, GELU(g) u, or, clamped to a limit, g sigmoid(alpha g) (u + 1).
enum class Gate : int { silu = 0, gelu_tanh = 1, clamped_swiglu = 2 };

// A gated MLP that computes some of the rows.
struct Expert {
  Matrix gate_up;  // as in Layer
  Matrix down;
};

// Experts instead of an MLP (Shazeer et al., Outrageously Large Neural Networks, 2017, section 2).
struct Mixture {
  int count = 0;   // experts among which the router chooses; 0 without experts
  int active = 0;  // experts of a row
  bool renormalizes = false;
  bool has_shared = false;          // one more expert computes all rows
  Matrix router;                    // [count, hidden], and a row for the gate of the shared expert
  const Expert* experts = nullptr;  // [count], then the shared expert
};

// Norm weights are null where a layer has no such norm.
struct Layer {
  const float* attention_norm = nullptr;  // [hidden]
  Matrix qkv;                             // rows: query heads, key heads, value heads
  const float* q_norm = nullptr;          // [head_dim] or null
  const float* k_norm = nullptr;
  const float* q_norm_whole = nullptr;  // [heads * head_dim] or null: all heads together
  const float* k_norm_whole = nullptr;
  const float* cos = nullptr;    // [max_tokens, head_dim]; null if the layer is not rotated
  const float* sin = nullptr;    // [max_tokens, head_dim]; the first half is negated
  int window = 0;                // tokens that a token attends to, including its own; 0 for all
  const float* sinks = nullptr;  // [heads]: scores without a value in the softmax of each head; null for none
  Matrix output;
  const float* attention_output_norm = nullptr;  // [hidden]
  const float* mlp_norm = nullptr;
  Matrix gate_up;  // panels alternate: 16 gate outputs, then the 16 corresponding up outputs
  Matrix down;
  const float* mlp_output_norm = nullptr;
  Mixture mixture;  // then gate_up and down have no panels, and mlp_output_norm is null
};

struct Model {
  int hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0, vocabulary = 0, max_tokens = 0;
  float epsilon = 0.0f;
  float scale = 0.0f;                                      // factor of attention scores
  float attention_soft_cap = 0.0f, logit_soft_cap = 0.0f;  // s becomes cap * tanh(s / cap); 0 for none
  float embedding_scale = 1.0f;
  float residual_scale = 1.0f;  // factor of what is added to the residual
  Gate gate = Gate::silu;
  float swiglu_alpha = 0.0f, swiglu_limit = 0.0f;  // of Gate::clamped_swiglu
  Matrix embedding;                                // [vocabulary, hidden]; one row is dequantized per token
  Matrix head;                                     // shares its data with `embedding` if the weights are tied
  const float* final_norm = nullptr;
  const float* head_norm = nullptr;  // final norm times the factor of the logits
  const Layer* layers = nullptr;
  int num_layers = 0;
  int input_bits = 16;  // input precision for quantized matrices: 8, 16 (bfloat16 on levels with bf16 dot products), 32
};

}  // namespace kvferry
