// Rows of a tree: keys and values of a path, copied to the positions of its tokens. A row's arithmetic is then the same
// as without a tree, whichever other rows the tree has.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/batch.hpp"
#include "data/kv_type.hpp"
#include "simd/simd.hpp"
#include "attention/pages.hpp"

namespace kvferry::KVFERRY_LEVEL {

// KV cache index of each token of a row's path; the token at index i has position `first` + i.
struct Path {
  int first, end;
  int places[kMaxTreeTokens];

  int place(int position) const { return position < first ? position : places[position - first]; }
};

static inline Path path_of(const Batch& batch, const Sequence& s, int query) {
  Path path;
  path.first = path.end = first_position(s);
  for (uint64_t bits = batch.paths[s.first + query]; bits; bits &= bits - 1)
    path.places[path.end++ - path.first] = path.first + std::countr_zero(bits);
  return path;
}

// Copies the keys and values of positions [first, first + 16) of a path; the first `hidden` tokens of the sequence and
// positions from the end of the path on are zeros.
template <KvType K>
static inline TokenGroup path_group_at(const Batch& batch, const AttentionGeometry& g, const Sequence& s,
                                       const Path& path, int kv_head, int first, int hidden, TokenGroupCopy& copy) {
  const size_t values = value_offset<K>(g), row = row_bytes<K>(g);
  for (int t = 0; t < 16; ++t) {
    const int position = first + t;
    const bool is_there = position < path.end && position >= hidden;
    const Key key = is_there ? key_at<K>(batch, g, s, kv_head, path.place(position)) : Key{};
    for (size_t half = 0; half < 2; ++half) {
      copy_or_clear(copy.rows[half] + t * row, is_there ? key.row + half * values : nullptr, row);
      if constexpr (has_scales(K))
        copy_or_clear(copy.scales[half] + t * kScaleBytes, is_there ? key.scale + half * values : nullptr, kScaleBytes);
    }
  }
  return {copy.rows[0], copy.rows[1], copy.scales[0], copy.scales[1]};
}

}  // namespace kvferry::KVFERRY_LEVEL
