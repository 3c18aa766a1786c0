// Checks the arrays of a batch that come from outside the kernels.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "data/batch.hpp"
#include "data/model.hpp"

namespace kvferry {

inline void check(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Checks that `count` indices are in [least, end).
inline void check_indices(const int64_t* indices, size_t count, int64_t least, int64_t end, const char* what) {
  for (size_t i = 0; i < count; ++i) check(indices[i] >= least && indices[i] < end, what);
}

// Checks the pages that a sequence reads or writes; pages before the window of its first row are not read.
inline void check_pages(const Sequence& s, int window, int block_tokens, int64_t num_pages) {
  const size_t first = size_t(hidden_tokens(window, first_position(s)) / block_tokens);
  const size_t end = size_t((s.context + block_tokens - 1) / block_tokens);
  check_indices(s.pages + first, end - first, 0, num_pages, "a page does not exist");
}

// Describes the sequences of a batch of `rows` rows; `width`: blocks per table; `window`: window of the layers in these
// pages; `trees`: number of tokens of each sequence's tree, null without trees.
inline void describe_sequences(const int64_t* queries, const int64_t* contexts, const int64_t* tables, size_t width,
                               int rows, int max_tokens, int block_tokens, int64_t num_pages, size_t count, int window,
                               const int64_t* trees, std::vector<Sequence>& sequences) {
  sequences.clear();
  int64_t first = 0;
  for (size_t s = 0; s < count; ++s) {
    const int64_t own = queries[s], context = contexts[s];
    const int64_t* table = tables + s * width;
    check(own > 0 && context >= own && context <= max_tokens, "a sequence has rows beyond its context length");
    const size_t blocks = size_t((context + block_tokens - 1) / block_tokens);
    check(blocks <= width, "a sequence's block table is too short");
    const int64_t of_tree = trees ? trees[s] : 0;
    check(of_tree == 0 || (of_tree >= own && of_tree <= context && of_tree <= kMaxTreeTokens),
          "the size of a tree is not valid");
    sequences.push_back({int(first), int(own), int(context), table, int(of_tree)});
    check_pages(sequences.back(), window, block_tokens, num_pages);
    first += own;
  }
  check(first == rows, "the sequences' rows do not add up to the batch's rows");
}

// Checks the paths of the rows of trees: a row's own token is the last one of its path, and the root is the first.
inline void check_paths(const Batch& b) {
  for (int i = 0; i < b.num_sequences; ++i) {
    const Sequence& s = b.sequences[i];
    for (int row = s.first; s.tree_tokens && row < s.first + s.queries; ++row) {
      const int own = s.tree_tokens - s.queries + row - s.first;
      const uint64_t path = b.paths[row];
      check((path & 1) && path >> own == 1, "the path of a row is not valid");
      check(first_position(s) + std::popcount(path) - 1 == b.positions[row], "a position differs from the row's path");
    }
  }
}

// Returns the window of each layer group: the largest window of its layers, or 0 if one of them has full attention.
// Checks the layers' positions in pages.
inline std::vector<int> group_windows(const Model& m, const Batch& b) {
  std::vector<int> windows;
  for (int i = 0; i < m.num_layers; ++i) {
    if (b.places) {
      check_indices(b.places + 2 * i, 1, 0, m.num_layers, "the group of a layer does not exist");
      check_indices(b.places + 2 * i + 1, 1, 0, b.page_layers, "the position of a layer is beyond the page");
    }
    const size_t group = size_t(place_of(b, i, m.num_layers).group);
    if (group >= windows.size()) windows.resize(group + 1, -1);
    const int own = m.layers[i].window, others = windows[group];
    windows[group] = others < 0 ? own : own == 0 || others == 0 ? 0 : std::max(own, others);
  }
  for (int window : windows) check(window >= 0, "a layer group has no layers");
  return windows;
}

// Checks the slots and pages of further layer groups.
inline void check_further(const Batch& b, const std::vector<int>& windows, int block_tokens, int64_t num_pages) {
  check_indices(b.further_slots, (windows.size() - 1) * size_t(b.rows), 0, num_pages * block_tokens,
                "a slot is beyond the pages");
  for (int group = 1; group < int(windows.size()); ++group)
    for (int s = 0; s < b.num_sequences; ++s)
      check_pages(sequence_of(b, group, s), windows[size_t(group)], block_tokens, num_pages);
}

}  // namespace kvferry
