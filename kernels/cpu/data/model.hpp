// A model: packed weight matrices, norm weights and RoPE tables.
#pragma once
#include "data/matrix.hpp"

namespace kvferry {

// Activation of the gated MLP, from gate values g and up values u: SiLU(g) u, GELU(g) u, or, clamped to a limit, g
// sigmoid(alpha g) (u + 1).
enum class Gate : int { silu = 0, gelu_tanh = 1, clamped_swiglu = 2 };

// A gated MLP that computes the rows routed to it.
struct Expert {
  Matrix gate_up;  // as in Layer
  Matrix down;
};

// MoE layer: experts instead of an MLP (Shazeer et al., Outrageously Large Neural Networks, 2017, section 2).
struct Mixture {
  int count = 0;   // number of routed experts; 0 for a dense layer
  int active = 0;  // experts per row
  bool renormalizes = false;
  bool is_sigmoid = false;  // scores are sigmoids of the router's outputs instead of their softmax
  // Experts are divided into groups of equal size; only experts of the best `active_groups` groups are chosen. A
  // group's score is the largest score of its experts or, with sigmoids, the sum of the two largest.
  int groups = 1, active_groups = 1;
  float weight_scale = 1.0f;          // factor of the routing weights
  const float* correction = nullptr;  // [count]: added to scores when choosing experts; null for none
  bool has_shared = false;            // a further expert computes all rows
  bool has_shared_gate = false;       // its weight is a sigmoid of a further router output, instead of 1
  Matrix router;                      // [count, hidden], and a row for the shared expert's gate
  const Expert* experts = nullptr;    // [count], followed by the shared expert
};

// Latent attention (DeepSeek-AI, DeepSeek-V2, 2024, section 2.1): a page has a vector of `rank` + `rotated` elements
// per token; the keys and values of all heads are projections of this vector. The key projection is applied to the
// queries instead of the keys.
struct Latent {
  int rank = 0;        // 0 for a model with keys and values
  int rotated = 0;     // rotated elements, at the end of queries and latent vectors
  int plain = 0;       // unrotated elements of a query
  int value = 0;       // elements of a value
  int query_rank = 0;  // elements of the latent query vector; 0 if queries are projected from the hidden state
  int width() const { return rank + rotated; }
};

// Norm weights are null where a layer has no such norm.
struct Layer {
  const float* attention_norm = nullptr;  // [hidden]
  Matrix qkv;                             // rows: query heads, key heads, value heads
  const float* q_norm = nullptr;          // [head_dim] or null
  const float* k_norm = nullptr;
  const float* q_norm_whole = nullptr;  // [heads * head_dim] or null: norm over all heads together
  const float* k_norm_whole = nullptr;
  const float* cos = nullptr;    // [max_tokens, head_dim]; null if the layer is not rotated
  const float* sin = nullptr;    // [max_tokens, head_dim]; the first half is negated
  int window = 0;                // number of tokens that a token attends to, including itself; 0 for all
  const float* sinks = nullptr;  // [heads]: scores without a value in the softmax of each head; null for none
  // With latent attention, qkv has the rows of the latent query vector (or of the queries) and then the rows of the
  // latent vector.
  const float* query_norm = nullptr;   // [query_rank]
  const float* latent_norm = nullptr;  // [rank]
  Matrix query_up;                     // [heads * head_dim, query_rank]; no panels without query_rank
  Matrix absorb;                       // [heads * rank, plain]: each head's transposed key projection
  Matrix value_up;                     // [heads * value, rank]
  Matrix output;
  const float* attention_output_norm = nullptr;  // [hidden]
  const float* mlp_norm = nullptr;
  Matrix gate_up;  // panels alternate: 16 gate outputs, then the 16 corresponding up outputs
  Matrix down;
  const float* mlp_output_norm = nullptr;
  Mixture mixture;  // if set, gate_up and down have no panels, and mlp_output_norm is null
};

struct Model {
  int inputs = 0;  // inputs of the first layer's attention: `hidden`, or more if rows are given as vectors
  int hidden = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0, vocabulary = 0, max_tokens = 0;
  // If several ranks compute the model, the sizes above are this rank's share. The fields below say which share: its
  // first KV head in pages of `page_kv_heads` heads, and its first token in logits of `all_tokens` tokens.
  int first_kv_head = 0, page_kv_heads = 0, first_token = 0, all_tokens = 0;
  float epsilon = 0.0f;
  float scale = 0.0f;                                      // factor of attention scores
  float attention_soft_cap = 0.0f, logit_soft_cap = 0.0f;  // s becomes cap * tanh(s / cap); 0 for none
  float embedding_scale = 1.0f;
  float residual_scale = 1.0f;  // factor of every term that is added to the residual
  Gate gate = Gate::silu;
  float swiglu_alpha = 0.0f, swiglu_limit = 0.0f;  // for Gate::clamped_swiglu
  Matrix embedding;                                // [vocabulary, hidden], or without data if rows are vectors
  Matrix head;                                     // shares its data with `embedding` if the weights are tied
  const float* final_norm = nullptr;               // applied to hidden states that are returned; null for none
  const float* head_norm = nullptr;                // final norm times the logits' factor; null for none
  const Layer* layers = nullptr;
  int num_layers = 0;
  Latent latent;
  int key_dim() const { return latent.rank ? latent.width() : head_dim; }
  int value_dim() const { return latent.rank ? latent.rank : head_dim; }
  int attended_width() const { return heads * (latent.rank ? latent.value : head_dim); }
  int input_bits = 16;  // input precision for quantized matrices: 8, 16 (bfloat16 on levels with bf16 dot products), 32
};

}  // namespace kvferry
