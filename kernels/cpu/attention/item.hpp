// Work items of attention, and the limits for splitting sequences into items.
#pragma once
namespace kvferry {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxRank = 512;         // unrotated elements of a latent vector
constexpr int kMaxKeyDim = 640;       // elements of a latent vector
constexpr int kPartition = 256;       // tokens per partition; each has its own softmax state
constexpr int kMaxTileQueries = 128;  // queries per item; all of them share the packed keys and values

// Number of query positions per item if `group` query heads share a KV head.
constexpr int tile_queries(int group) {
  return group >= kMaxTileQueries ? 1 : kMaxTileQueries / (group > 4 ? group / 4 : 1);
}

// Unit of attention work: a sequence, or decoding sequences that share pages, with a range of KV heads, of queries and
// of partitions.
struct AttentionItem {
  int sequence, kv_begin, kv_end;  // KV heads [begin, end)
  int first_query, queries;
  int begin, end;  // partitions
  // For an item of decoding sequences that share the pages of this partition, index of the first sequence in
  // Step::sharers; the other sequences follow. Each sequence has one query, which attends to the whole partition. -1 if
  // the item has one sequence.
  int first_sharer;
};

}  // namespace kvferry
