// Batch of a step: its rows, sequences and KV pages, and the output arrays.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>

#include "data/adapter.hpp"
#include "data/kv_type.hpp"

namespace kvferry {

struct Sequence {
  int first;             // index of the sequence's first row
  int queries;           // number of rows computed in this step
  int context;           // context length: tokens in the KV cache after this step's writes
  const int64_t* pages;  // block table: page id of each block
  // Number of tokens at the end of the context that are a tree, including the sequence's rows; 0 without a tree. A row
  // of a tree attends to the tokens before the tree and to its path, which are its own token and its ancestors.
  int tree_tokens = 0;
};

constexpr int kMaxTreeTokens = 64;

// Position of the first token of a sequence's tree, or of its first row without a tree; no row has a lower position.
inline int first_position(const Sequence& s) { return s.context - (s.tree_tokens ? s.tree_tokens : s.queries); }

struct Batch {
  int rows = 0;
  const int64_t* tokens = nullptr;     // [rows]
  const int64_t* positions = nullptr;  // [rows]
  const int64_t* slots = nullptr;      // [rows]: page * block_tokens + offset in the page
  const Sequence* sequences = nullptr;
  int num_sequences = 0;
  const int64_t* sampled = nullptr;  // [num_sampled]: indices of the rows whose logits are computed
  int num_sampled = 0;
  uint8_t* pages = nullptr;  // [pages][page_layers][2][page_kv_heads], each `head_bytes`: [block_tokens][head_dim]
  // [layers][2]: layer group of each layer, and the layer's index in the group's pages. Null if pages hold all layers
  // in order. `slots` and the sequences' tables belong to group 0; the arrays below hold the further groups in order.
  const int64_t* places = nullptr;
  int page_layers = 0;
  const int64_t* further_slots = nullptr;   // [groups - 1, rows]
  const int64_t* further_tables = nullptr;  // [groups - 1, num_sequences, table_width]
  size_t table_width = 0;
  KvType kv_type = KvType::f32;
  int block_tokens = 0;
  float* logits = nullptr;         // [num_sampled, all_tokens]
  int64_t* greedy = nullptr;       // [num_sampled] argmax; the lowest index on ties
  uint8_t* finite = nullptr;       // [num_sampled] 1 if all logits of the row are finite
  const int64_t* shown = nullptr;  // [num_shown]: indices of the rows whose hidden states are returned
  int num_shown = 0;
  float* hidden = nullptr;                  // [num_shown, hidden] the hidden states after the final norm
  const int64_t* adapter_of_row = nullptr;  // [rows]: index in `adapters`, -1 for none
  const Adapter* const* adapters = nullptr;
  int num_adapters = 0;  // 0 if no row has an adapter
  // If rows are vectors instead of tokens: the residual before the first layer, and the inputs of the first layer's
  // attention, which may be wider. Both are null if rows are tokens.
  const float* residuals = nullptr;  // [rows, hidden]
  const float* inputs = nullptr;     // [rows, inputs of the model]
  const int64_t* taps = nullptr;     // [num_taps]: layers whose inputs (the residual before them) are returned
  int num_taps = 0;
  float* tapped = nullptr;  // [rows, num_taps, hidden]
  // [rows]: for rows of a tree, bit i is set if the row's path contains token i of the tree. Null without trees.
  const uint64_t* paths = nullptr;
};

// Number of tokens that a row attends to without a window, which is its position plus 1.
inline int attended_tokens(const Batch& b, const Sequence& s, int query) {
  if (!s.tree_tokens) return s.context - s.queries + query + 1;
  return first_position(s) + std::popcount(b.paths[s.first + query]);
}

// Location of a layer's keys and values.
struct Place {
  int group, layer, page_layers;  // layer group, index of the layer in the group's pages, and layers per page
};

inline Place place_of(const Batch& b, int layer, int num_layers) {
  if (!b.places) return {0, layer, num_layers};
  return {int(b.places[2 * layer]), int(b.places[2 * layer + 1]), b.page_layers};
}

inline const int64_t* slots_of(const Batch& b, int group) {
  return group ? b.further_slots + size_t(group - 1) * size_t(b.rows) : b.slots;
}

// A sequence with its pages in a layer group.
inline Sequence sequence_of(const Batch& b, int group, int index) {
  Sequence s = b.sequences[index];
  if (group) s.pages = b.further_tables + (size_t(group - 1) * size_t(b.num_sequences) + size_t(index)) * b.table_width;
  return s;
}

// Number of leading tokens that rows from `position` on do not attend to.
inline int hidden_tokens(int window, int position) {
  const int hidden = window ? position + 1 - window : 0;
  return hidden < 0 ? 0 : hidden;
}

}  // namespace kvferry
