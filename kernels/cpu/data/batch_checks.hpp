// Checks the arrays of a batch that come from outside of the kernels.
#pragma once
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "data/batch.hpp"

namespace kvferry {

inline void check(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

// Checks that `count` indices are from `least` to below `end`.
inline void check_indices(const int64_t* indices, size_t count, int64_t least, int64_t end, const char* what) {
  for (size_t i = 0; i < count; ++i) check(indices[i] >= least && indices[i] < end, what);
}

// Describes the sequences of a batch of `rows` rows; `width`: blocks per table.
inline void describe_sequences(const int64_t* queries, const int64_t* contexts, const int64_t* tables, size_t width,
                               int rows, int max_tokens, int block_tokens, int64_t num_pages, size_t count,
                               std::vector<Sequence>& sequences) {
  sequences.clear();
  int64_t first = 0;
  for (size_t s = 0; s < count; ++s) {
    const int64_t own = queries[s], context = contexts[s];
    const int64_t* table = tables + s * width;
    check(own > 0 && context >= own && context <= max_tokens, "a sequence has rows beyond its context");
    const size_t blocks = size_t((context + block_tokens - 1) / block_tokens);
    check(blocks <= width, "a sequence's table of pages is too short");
    check_indices(table, blocks, 0, num_pages, "a page is not there");
    sequences.push_back({int(first), int(own), int(context), table});
    first += own;
  }
  check(first == rows, "the sequences' rows do not add up");
}

}  // namespace kvferry
