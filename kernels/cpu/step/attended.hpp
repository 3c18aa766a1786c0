// The phases of a step around attention: items, the merge of partial results, and latent attention.
#pragma once
#include <cstddef>
#include <cstring>

#include "data/batch.hpp"
#include "data/kv_type.hpp"
#include "data/matrix.hpp"
#include "data/model.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/inputs.hpp"
#include "products/products.hpp"
#include "attention/attention.hpp"
#include "attention/item.hpp"
#include "attention/softmax.hpp"
#include "attention/write_kv.hpp"
#include "step/elementwise.hpp"
#include "step/gated.hpp"
#include "step/level.hpp"
#include "step/step.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Computes the attention of one item. `queries`: [rows][width]. Results that need no later merge are written to the f32
// rows of `attended`. `Widest`: maximum size of a value vector.
template <int Widest>
static inline void attend_item(Step& step, const Layer& layer, int layer_index, int chunk, int thread,
                               const float* queries, int width, const Rows& attended) {
  const Model& m = step.model;
  const AttentionItem& item = step.items[size_t(chunk)];
  const Sequence& sequence = step.batch.sequences[item.sequence];
  const bool is_cut = step.first_partial[size_t(item.sequence)] >= 0;
  // A partition before the windows of all rows has no partial result; `merge_partials` skips it.
  if (is_cut && item.end * kPartition <= hidden_tokens(layer.window, first_position(sequence))) return;
  const AttentionGeometry g{place_of(step.batch, layer_index, m.num_layers),
                            m.first_kv_head,
                            m.page_kv_heads,
                            m.heads / m.kv_heads,
                            m.key_dim(),
                            step.batch.block_tokens,
                            m.latent.rank ? 1 : 2,
                            m.value_dim(),
                            m.scale,
                            layer.window,
                            m.attention_soft_cap};
  const AttentionScratch s = lay_out_scratch(step.scratch(thread), g.group, g.head_dim);
  const size_t follower = size_t(chunk) + size_t(step.threads());
  const AttentionItem* next = follower < step.items.size() ? &step.items[follower] : nullptr;
  const int rows = item.queries * g.group, D = g.value_dim;
  const int* sharers = item.first_sharer < 0 ? nullptr : step.sharers.data() + item.first_sharer;
  for (int kv_head = item.kv_begin; kv_head < item.kv_end; ++kv_head) {
    switch (step.batch.kv_type) {
      case KvType::f32:
        attend<KvType::f32, Widest>(step.batch, g, item, sharers, kv_head, next, queries, width, s);
        break;
      case KvType::bf16:
        attend<KvType::bf16, Widest>(step.batch, g, item, sharers, kv_head, next, queries, width, s);
        break;
      case KvType::int8:
        if constexpr (Widest == kMaxHeadDim)  // latent vectors do not support KV in 8 bits
          attend<KvType::int8, Widest>(step.batch, g, item, sharers, kv_head, next, queries, width, s);
        break;
      case KvType::fp8:
        if constexpr (Widest == kMaxHeadDim)
          attend<KvType::fp8, Widest>(step.batch, g, item, sharers, kv_head, next, queries, width, s);
        break;
    }
    if (is_cut) {
      for (int r = 0; r < rows; ++r) {
        const int owner = sharers ? sharers[r / g.group] : item.sequence, at = sharers ? r % g.group : r;
        const size_t partial = size_t(step.first_partial[size_t(owner)] + item.begin * m.kv_heads + kv_head);
        float* to = step.partials + partial * step.partial_floats + size_t(at) * (D + 2);
        for (int d = 0; d < D; d += 16) v_store(to + d, v_load(s.totals + size_t(r) * D + d));
        to[D] = s.max_score[r];
        to[D + 1] = s.sums[r];
      }
      continue;
    }
    if (layer.sinks) add_sinks(layer.sinks + kv_head * g.group, g.group, s.max_score, s.sums, s.totals, rows, D);
    for (int r = 0; r < rows; ++r) {
      const int row = sequence.first + item.first_query + r / g.group, head = kv_head * g.group + r % g.group;
      float* to = attended.f32 + size_t(row) * attended.stride + size_t(head) * D;
      const V sum = v_set(s.sums[r]);
      for (int d = 0; d < D; d += 16) v_store(to + d, v_div(v_load(s.totals + size_t(r) * D + d), sum));
    }
  }
}

// Merges the partial results of split sequences in the order of partitions, and writes the input rows of the output
// projection, or of the projection of latent vectors to values.
template <int Widest>
static inline void merge_partials(Step& step, const Layer& layer, int chunk, const Rows& inputs) {
  const Model& m = step.model;
  const Batch& b = step.batch;
  const int D = m.value_dim(), group = m.heads / m.kv_heads;
  const int begin = chunk * step.row_chunk, end = b.rows < begin + step.row_chunk ? b.rows : begin + step.row_chunk;
  int s = 0;
  for (int row = begin; row < end; ++row) {
    while (b.sequences[s].first + b.sequences[s].queries <= row) ++s;
    const Sequence& sequence = b.sequences[s];
    float* attended = inputs.f32 + size_t(row) * inputs.stride;
    const int first = step.first_partial[size_t(s)];
    if (first >= 0) {
      const int parts = (sequence.context + kPartition - 1) / kPartition, query = row - sequence.first;
      const int position = attended_tokens(b, sequence, query) - 1;
      const int first_part = hidden_tokens(layer.window, first_position(sequence)) / kPartition;
      for (int head = 0; head < m.heads; head += 16) {
        const int heads = m.heads - head < 16 ? m.heads - head : 16;
        alignas(64) float values[16 * Widest], keep[16], take[16];
        for (int i = 0; i < heads * D; i += 16) v_store(values + i, v_zero());
        Softmax all;
        v_store(all.max_score, v_set(-__builtin_inff()));
        for (int p = first_part; p < parts && p * kPartition <= position; ++p) {
          const float* from[16];
          Softmax further;
          for (int h = 0; h < heads; ++h) {
            from[h] = step.partials + size_t(first + p * m.kv_heads + (head + h) / group) * step.partial_floats +
                      size_t(query * group + (head + h) % group) * (D + 2);
            further.max_score[h] = from[h][D];
            further.sums[h] = from[h][D + 1];
          }
          merge_sums(all, further, keep, take);
          for (int h = 0; h < heads; ++h) merge_values(values + h * D, from[h], keep[h], take[h], D);
        }
        if (layer.sinks) add_sinks(layer.sinks + head, heads, all.max_score, all.sums, values, heads, D);
        for (int h = 0; h < heads; ++h) {
          const V sum = v_set(all.sums[h]);
          for (int d = 0; d < D; d += 16)
            v_store(attended + (head + h) * D + d, v_div(v_load(values + h * D + d), sum));
        }
      }
    }
    write_input(inputs, row, m.heads * D, attended);
  }
}

constexpr float kLatentEpsilon = 1e-6f;  // for the norms of latent vectors, independent of the model's epsilon

// Writes the latent vectors of rows to their pages, and the inputs of query_up.
static inline void write_latent_rows(Step& step, const Layer& layer, int layer_index, int first, int end) {
  const Model& m = step.model;
  const Batch& b = step.batch;
  const Latent& latent = m.latent;
  const int width = layer.qkv.panels * kPanel,
            of_queries = latent.query_rank ? latent.query_rank : m.heads * m.head_dim;
  const Place place = place_of(b, layer_index, m.num_layers);
  const int64_t* slots = slots_of(b, place.group);
  for (int row = first; row < end; ++row) {
    float *query = step.qkv + size_t(row) * width, *vector = query + of_queries;
    rms_norm(vector, layer.latent_norm, latent.rank, kLatentEpsilon, vector);
    const size_t angles = size_t(b.positions[row]) * latent.rotated;
    apply_rope(vector + latent.rank, layer.cos + angles, layer.sin + angles, latent.rotated);
    const size_t page = size_t(slots[row] / b.block_tokens), slot = size_t(slots[row] % b.block_tokens);
    const size_t at = (page * place.page_layers + place.layer) * head_bytes(b.kv_type, b.block_tokens, latent.width());
    write_kv(b, b.pages + at, slot, vector, latent.width());
    if (!latent.query_rank) continue;
    float* wide = step.query_x.f32 + size_t(row) * step.query_x.stride;
    rms_norm(query, layer.query_norm, latent.query_rank, kLatentEpsilon, wide);
    write_input(step.query_x, row, latent.query_rank, wide);
  }
}

// Splits the rows' queries: unrotated elements become inputs of absorb; rotated elements become the ends of queries for
// latent vectors.
static inline void split_queries(Step& step, const Layer& layer, int first, int end) {
  const Model& m = step.model;
  const Latent& latent = m.latent;
  const Matrix& source = latent.query_rank ? layer.query_up : layer.qkv;
  const size_t width = size_t(source.panels) * kPanel;
  for (int row = first; row < end; ++row) {
    float* query = (latent.query_rank ? step.queries : step.qkv) + size_t(row) * width;
    float* plain = step.absorb_x.f32 + size_t(row) * step.absorb_x.stride;
    float* vector = step.absorbed + size_t(row) * m.heads * latent.width();
    const size_t angles = size_t(step.batch.positions[row]) * latent.rotated;
    for (int h = 0; h < m.heads; ++h) {
      float* of_head = query + h * m.head_dim;
      apply_rope(of_head + latent.plain, layer.cos + angles, layer.sin + angles, latent.rotated);
      std::memcpy(plain + h * latent.plain, of_head, size_t(latent.plain) * 4);
      std::memcpy(vector + h * latent.width() + latent.rank, of_head + latent.plain, size_t(latent.rotated) * 4);
    }
    write_input(step.absorb_x, row, m.heads * latent.plain, plain);
  }
}

// A chunk of a per-head product: the `inputs` inputs of a head times the panels of the head, into `to` [rows][stride],
// where the outputs of consecutive heads are `apart` elements apart.
static inline void multiply_head(Step& step, const Matrix& m, const Rows& x, int inputs, int chunk, int thread,
                                 float* to, size_t stride, int apart) {
  const int heads = step.model.heads, head = chunk % heads, first_row = chunk / heads * step.head_rows;
  const int left = step.batch.rows - first_row, count = left < step.head_rows ? left : step.head_rows;
  const Rows of_head = x.columns_from(head * inputs).from(first_row);
  const int panels = m.panels / heads, first_panel = head * panels, at_a_time = panels_per_pass(m, count);
  float* out = to + size_t(first_row) * stride + size_t(head) * apart;
  for (int p = 0; p < panels; p += at_a_time) {
    const int some = panels - p < at_a_time ? panels - p : at_a_time;
    const auto store = [=](const Tile& tile) {
      for (int r = 0; r < tile.rows; ++r)
        for (int c = 0; c < tile.columns; ++c)
          v_store(out + size_t(tile.row + r) * stride + size_t(tile.panel + c - first_panel) * kPanel, tile.at(r, c));
    };
    product(m, of_head, count, first_panel + p, some, step.scratch(thread), Epilogue(store));
  }
}

[[gnu::noinline]] static void run_latent_chunk(Step& step, Phase phase, const Layer& layer, int layer_index, int chunk,
                                               int thread) {
  const Model& m = step.model;
  const Latent& latent = m.latent;
  const int first = chunk * step.row_chunk, rows = step.batch.rows;
  const int end = rows < first + step.row_chunk ? rows : first + step.row_chunk;
  const int of_vectors = m.heads * latent.width();
  switch (phase) {
    case Phase::latent_rows: write_latent_rows(step, layer, layer_index, first, end); break;
    case Phase::query_up:
      store_product(layer.query_up, step.query_x, rows, step.query_blocking, nullptr, chunk, step.scratch(thread),
                    step.queries, size_t(layer.query_up.panels) * kPanel);
      break;
    case Phase::split_queries: split_queries(step, layer, first, end); break;
    case Phase::absorb:
      multiply_head(step, layer.absorb, step.absorb_x, latent.plain, chunk, thread, step.absorbed, size_t(of_vectors),
                    latent.width());
      break;
    case Phase::attend:
      attend_item<kMaxRank>(step, layer, layer_index, chunk, thread, step.absorbed, of_vectors, step.attended_latent);
      break;
    case Phase::merge: merge_partials<kMaxRank>(step, layer, chunk, step.attended_latent); break;
    case Phase::value_up:
      multiply_head(step, layer.value_up, step.attended_latent, latent.rank, chunk, thread, step.attended.f32,
                    size_t(step.attended.stride), latent.value);
      break;
    default:
      for (int row = first; row < end; ++row)
        write_input(step.attended, row, m.attended_width(), step.attended.f32 + size_t(row) * step.attended.stride);
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
