// Batch of a step: its rows, sequences and KV pages, and the output arrays.
#pragma once
#include <cstdint>

#include "data/adapter.hpp"
#include "data/kv_type.hpp"

namespace kvferry {

struct Sequence {
  int first;             // index of the sequence's first row
  int queries;           // rows computed in this step
  int context;           // tokens in the KV cache after this step's writes
  const int64_t* pages;  // block table: page id of each block
};

struct Batch {
  int rows = 0;
  const int64_t* tokens = nullptr;     // [rows]
  const int64_t* positions = nullptr;  // [rows]
  const int64_t* slots = nullptr;      // [rows]: page * block_tokens + offset in the page
  const Sequence* sequences = nullptr;
  int num_sequences = 0;
  const int64_t* sampled = nullptr;  // [num_sampled]: indices of the rows whose logits are computed
  int num_sampled = 0;
  uint8_t* pages = nullptr;  // [pages][layers][2][kv_heads], each `head_bytes`: [block_tokens][head_dim]
  KvType kv_type = KvType::f32;
  int block_tokens = 0;
  float* logits = nullptr;         // [num_sampled, vocabulary]
  int64_t* greedy = nullptr;       // [num_sampled] argmax; the lowest index on ties
  uint8_t* finite = nullptr;       // [num_sampled] 1 if all logits of the row are finite
  const int64_t* shown = nullptr;  // [num_shown]: indices of the rows whose hidden states are returned
  int num_shown = 0;
  float* hidden = nullptr;                  // [num_shown, hidden] hidden states after the final norm
  const int64_t* adapter_of_row = nullptr;  // [rows]: index in `adapters`, -1 for none
  const Adapter* const* adapters = nullptr;
  int num_adapters = 0;  // 0 if no row has an adapter
  // Rows of vectors instead of tokens: the residual before the first layer, and the inputs of its attention, which may
  // be wider. Both null if rows are tokens.
  const float* residuals = nullptr;  // [rows, hidden]
  const float* inputs = nullptr;     // [rows, inputs of the model]
  const int64_t* taps = nullptr;     // [num_taps]: layers whose inputs (the residual before them) are returned
  int num_taps = 0;
  float* tapped = nullptr;  // [rows, num_taps, hidden]
};

}  // namespace kvferry
