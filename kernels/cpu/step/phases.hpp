// Implementation of the phases of a step.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "data/batch.hpp"
#include "data/kv_type.hpp"
#include "data/matrix.hpp"
#include "data/model.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/blocking.hpp"
#include "products/inputs.hpp"
#include "products/products.hpp"
#include "products/tiles.hpp"
#include "attention/item.hpp"
#include "attention/write_kv.hpp"
#include "step/adapted.hpp"
#include "step/attended.hpp"
#include "step/elementwise.hpp"
#include "step/gated.hpp"
#include "step/level.hpp"
#include "step/mixture.hpp"
#include "step/step.hpp"

namespace kvferry::KVFERRY_LEVEL {

static inline void norm_or_copy(const Model& m, const float* from, const float* weight, float* to) {
  if (weight) {
    rms_norm(from, weight, m.hidden, m.epsilon, to);
  } else if (to != from) {
    std::memcpy(to, from, size_t(m.hidden) * 4);
  }
}

// Copies rows [first, end) of the residual to the taps of the layer that follows.
static inline void tap_rows(Step& step, int layer, int first, int end) {
  const Batch& b = step.batch;
  const size_t n = size_t(step.model.hidden);
  for (int t = 0; t < b.num_taps; ++t) {
    if (b.taps[t] != layer) continue;
    for (int row = first; row < end; ++row)
      std::memcpy(b.tapped + (size_t(row) * size_t(b.num_taps) + size_t(t)) * n,
                  step.residual + size_t(row) * step.x.stride, n * 4);
  }
}

// Scales an embedding, the first residual, and writes the inputs of the first layer.
static inline void enter_row(Step& step, int row, float* residual) {
  const Model& m = step.model;
  if (m.embedding_scale != 1.0f)
    for (int i = 0; i < m.hidden; ++i) residual[i] *= m.embedding_scale;
  float* wide = step.x.f32 + size_t(row) * step.x.stride;
  norm_or_copy(m, residual, m.layers[0].attention_norm, wide);
  write_input(step.x, row, m.hidden, wide);
}

static inline void embed_rows(Step& step, int chunk) {
  const Model& m = step.model;
  const int end = step.batch.rows < (chunk + 1) * step.row_chunk ? step.batch.rows : (chunk + 1) * step.row_chunk;
  const Batch& b = step.batch;
  for (int row = chunk * step.row_chunk; row < end; ++row) {
    float* residual = step.residual + size_t(row) * step.x.stride;
    if (b.inputs) {
      std::memcpy(residual, b.residuals + size_t(row) * m.hidden, size_t(m.hidden) * 4);
      write_input(step.x, row, m.inputs, b.inputs + size_t(row) * m.inputs);
      continue;
    }
    if (step.ranks) {  // the part is zero for tokens of other ranks; `finish_embedding` sums the parts
      float* part = step.ranks->own_part() + size_t(row) * step.x.stride;
      const int64_t token = step.batch.tokens[row] - m.first_token;
      if (token >= 0 && token < m.vocabulary)
        dequantize_matrix_row(m.embedding, int(token), part);
      else
        std::memset(part, 0, size_t(m.hidden) * 4);
      continue;
    }
    dequantize_matrix_row(m.embedding, int(step.batch.tokens[row]), residual);
    enter_row(step, row, residual);
  }
  if (!step.ranks) tap_rows(step, 0, chunk * step.row_chunk, end);
}

// Sums the ranks' parts of a row, in the order of ranks, so that every rank gets the same bits.
static inline void sum_parts(const Step& step, int row, float* to) {
  const size_t at = size_t(row) * step.x.stride;
  const float* first = step.ranks->part_of(0) + at;
  for (int i = 0; i < step.x.stride; i += kPanel) v_store(to + i, v_load(first + i));
  for (int r = 1; r < step.ranks->size(); ++r) {
    const float* part = step.ranks->part_of(r) + at;
    for (int i = 0; i < step.x.stride; i += kPanel) v_store(to + i, v_add(v_load(to + i), v_load(part + i)));
  }
}

// The end of `embed_rows`, if several ranks compute the model.
static inline void finish_embedding(Step& step, int chunk) {
  const Model& m = step.model;
  const int first = chunk * step.row_chunk;
  const int end = step.batch.rows < first + step.row_chunk ? step.batch.rows : first + step.row_chunk;
  for (int row = first; row < end; ++row) {
    float* residual = step.residual + size_t(row) * step.x.stride;
    sum_parts(step, row, residual);
    enter_row(step, row, residual);
  }
  tap_rows(step, 0, first, end);
}

// Returns a row of the residual. If the previous sublayer has a post-norm, or if ranks have parts of its output, this
// output has not been added yet: `to` then receives the sum of the residual and the output. `summed`: memory for a row
// of the output, which may be `to`.
static inline const float* residual_row(Step& step, const float* output_norm, int row, float* to, float* summed) {
  const Model& m = step.model;
  const float* residual = step.residual + size_t(row) * step.x.stride;
  const float* output = step.projected + size_t(row) * step.x.stride;
  if (step.ranks) {
    sum_parts(step, row, summed);
    output = summed;
  }
  if (output_norm) {
    add_normed(residual, output, output_norm, m.hidden, m.epsilon, m.residual_scale, to);
  } else if (step.ranks) {
    const V by = v_set(m.residual_scale);
    for (int i = 0; i < step.x.stride; i += kPanel)
      v_store(to + i, v_fma(v_load(output + i), by, v_load(residual + i)));
  } else {
    return residual;
  }
  return to;
}

// RMSNorm of rows [first, end) from the residual into x. If the previous sublayer has a post-norm, the rows of the
// residual are updated first.
static inline void norm_rows(Step& step, const float* output_norm, const float* weight, int first, int end) {
  for (int i = first; i < end; ++i) {
    float* wide = step.x.f32 + size_t(i) * step.x.stride;
    const size_t at = size_t(i) * step.x.stride;
    norm_or_copy(step.model, residual_row(step, output_norm, i, step.residual + at, step.projected + at), weight, wide);
    write_input(step.x, i, step.model.hidden, wide);
  }
}

// The norm before the head, for the sampled rows [first, end). The residual is not updated in place: hidden states of a
// sampled row may be returned too, and the sublayer's output would then be added twice.
static inline void norm_sampled_rows(Step& step, const float* output_norm, int first, int end) {
  const Model& m = step.model;
  for (int i = first; i < end; ++i) {
    float* wide = step.x.f32 + size_t(i) * step.x.stride;
    norm_or_copy(m, residual_row(step, output_norm, int(step.batch.sampled[i]), wide, wide), m.head_norm, wide);
    write_input(step.x, i, m.hidden, wide);
  }
}

// Writes the hidden states, after the final norm, of the rows [first, end) among those whose states are returned.
static inline void show_rows(Step& step, const float* output_norm, int first, int end) {
  const Model& m = step.model;
  for (int i = first < 0 ? 0 : first; i < end; ++i) {
    float* to = step.batch.hidden + size_t(i) * m.hidden;
    const int row = int(step.batch.shown[i]);
    float* sum = step.ranks ? step.projected + size_t(row) * step.x.stride : to;  // sums fill the stride of a row
    norm_or_copy(m, residual_row(step, output_norm, row, sum, sum), m.final_norm, to);
  }
}

static inline void rope_rows(Step& step, const Layer& layer, int layer_index, int chunk) {
  const Model& m = step.model;
  const Batch& b = step.batch;
  const int D = m.head_dim, width = layer.qkv.panels * kPanel;
  const int end = b.rows < (chunk + 1) * step.row_chunk ? b.rows : (chunk + 1) * step.row_chunk;
  const Place place = place_of(b, layer_index, m.num_layers);
  const int64_t* slots = slots_of(b, place.group);
  for (int row = chunk * step.row_chunk; row < end; ++row) {
    float* qkv = step.qkv + size_t(row) * width;
    if (layer.q_norm_whole) {
      float* keys = qkv + m.heads * D;
      rms_norm(qkv, layer.q_norm_whole, m.heads * D, m.epsilon, qkv);
      rms_norm(keys, layer.k_norm_whole, m.kv_heads * D, m.epsilon, keys);
    }
    const size_t angles = size_t(b.positions[row]) * D;
    for (int h = 0; h < m.heads + m.kv_heads; ++h) {
      const float* norm = h < m.heads ? layer.q_norm : layer.k_norm;
      if (norm) rms_norm(qkv + h * D, norm, D, m.epsilon, qkv + h * D);
      if (layer.cos) apply_rope(qkv + h * D, layer.cos + angles, layer.sin + angles, D);
    }
    const size_t page = size_t(slots[row] / b.block_tokens), slot = size_t(slots[row] % b.block_tokens);
    for (int half = 0; half < 2; ++half)
      for (int h = 0; h < m.kv_heads; ++h) {
        const size_t head =
            ((page * place.page_layers + place.layer) * 2 + half) * m.page_kv_heads + m.first_kv_head + h;
        write_kv(b, b.pages + head * head_bytes(b.kv_type, b.block_tokens, D), slot,
                 qkv + (m.heads + half * m.kv_heads + h) * D, D);
      }
  }
}

// Adds a sublayer's output to the residual, or stores it if the sublayer has a post-norm, which needs whole rows, or if
// it is a rank's part of the output.
static inline void accumulate_chunk(Step& step, const Matrix& m, const float* output_norm, const Rows& from,
                                    const Blocking& blocking, const Expansion* expansion, int chunk, int thread) {
  const size_t stride = size_t(step.x.stride);
  if (output_norm || step.ranks)
    return store_product(m, from, step.batch.rows, blocking, expansion, chunk, step.scratch(thread),
                         step.ranks ? step.ranks->own_part() : step.projected, stride);
  product_chunk(m, from, step.batch.rows, blocking, chunk, step.scratch(thread), expansion,
                [residual = step.residual, stride, by = step.model.residual_scale](const Tile& tile) {
                  float* to = residual + size_t(tile.row) * stride + size_t(tile.panel) * kPanel;
                  for (int r = 0; r < tile.rows; ++r, to += stride)
                    for (int c = 0; c < tile.columns; ++c) {
                      prefetch_for_write(to + c * kPanel, stride);
                      v_store(to + c * kPanel, v_fma(tile.at(r, c), v_set(by), v_load(to + c * kPanel)));
                    }
                });
}

static inline void head_chunk(Step& step, int chunk, int thread) {
  product_chunk(step.model.head, step.x, step.batch.num_sampled, step.head_blocking, chunk, step.scratch(thread),
                nullptr,
                [to = step.batch.logits + step.model.first_token, n = step.model.vocabulary,
                 stride = size_t(step.model.all_tokens)](const Tile& tile) { store_tile(tile, to, stride, n); });
}

static inline void cap_logits(float* logits, int n, float cap) {
  int i = 0;
  for (; i + 16 <= n; i += 16) v_store(logits + i, v_soft_cap(v_load(logits + i), cap));
  alignas(64) float last[16] = {};
  std::memcpy(last, logits + i, size_t(n - i) * 4);
  v_store(last, v_soft_cap(v_load(last), cap));
  std::memcpy(logits + i, last, size_t(n - i) * 4);
}

// Computes the argmax of a row's logits (lowest index on ties), and whether all logits are finite.
static inline void argmax_row(Step& step, int row) {
  const int n = step.model.all_tokens;
  float* logits = step.batch.logits + size_t(row) * n;
  if (step.model.logit_soft_cap > 0.0f) cap_logits(logits, n, step.model.logit_soft_cap);
  V top = v_set(-__builtin_inff()), poison = v_zero();
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V v = v_load(logits + i);
    top = v_max(v, top);
    poison = v_fma(v, v_zero(), poison);  // NaN once a logit is not finite
  }
  float best = v_reduce_max(top), bad = v_reduce_add(poison);
  for (; i < n; ++i) {
    best = logits[i] > best ? logits[i] : best;
    bad += logits[i] * 0.0f;
  }
  step.batch.finite[row] = bad == 0.0f;
  int64_t at = 0;
  if (bad == 0.0f)
    while (logits[at] != best) ++at;
  step.batch.greedy[row] = at;
}

static void run_chunk(Step& step, Phase phase, int layer_index, int chunk, int thread) {
  const Model& m = step.model;
  const Layer& layer = m.layers[layer_index];
  const int first = chunk * step.row_chunk;
  Expansion updates;
  const auto expansion = [&](LowRank AdapterLayer::* matrix) -> const Expansion* {
    if (!step.batch.num_adapters) return nullptr;
    updates = expansion_of(step, layer_index, matrix);
    return &updates;
  };
  const auto until = [&](int rows) { return rows < first + step.row_chunk ? rows : first + step.row_chunk; };
  switch (phase) {
    case Phase::embed: embed_rows(step, chunk); break;
    case Phase::embedded: finish_embedding(step, chunk); break;
    case Phase::qkv: {
      const int width = layer.qkv.panels * kPanel;
      product_chunk(layer.qkv, step.x, step.batch.rows, step.qkv_blocking, chunk, step.scratch(thread),
                    expansion(&AdapterLayer::qkv),
                    [to = step.qkv, width](const Tile& tile) { store_tile(tile, to, size_t(width), width); });
      break;
    }
    case Phase::rotate: rope_rows(step, layer, layer_index, chunk); break;
    case Phase::attend:
      if (m.latent.rank) return run_latent_chunk(step, phase, layer, layer_index, chunk, thread);
      attend_item<kMaxHeadDim>(step, layer, layer_index, chunk, thread, step.qkv, layer.qkv.panels * kPanel,
                               step.attended);
      break;
    case Phase::merge:
      if (m.latent.rank) return run_latent_chunk(step, phase, layer, layer_index, chunk, thread);
      merge_partials<kMaxHeadDim>(step, layer, chunk, step.attended);
      break;
    case Phase::output:
      accumulate_chunk(step, layer.output, layer.attention_output_norm, step.attended, step.output_blocking,
                       expansion(&AdapterLayer::output), chunk, thread);
      break;
    case Phase::mlp_norm:
      norm_rows(step, layer.attention_output_norm, layer.mlp_norm, first, until(step.batch.rows));
      break;
    case Phase::gate_up:
      gated_product(layer.gate_up, step.x, step.batch.rows, step.gate_up_blocking, expansion(&AdapterLayer::gate_up),
                    chunk, step.scratch(thread), step.hidden_up, m);
      break;
    case Phase::down:
      accumulate_chunk(step, layer.down, layer.mlp_output_norm, step.hidden_up, step.down_blocking,
                       expansion(&AdapterLayer::down), chunk, thread);
      break;
    case Phase::next_norm:
      if (layer_index + 1 < m.num_layers) {
        norm_rows(step, layer.mlp_output_norm, m.layers[layer_index + 1].attention_norm, first, until(step.batch.rows));
        tap_rows(step, layer_index + 1, first, until(step.batch.rows));
      } else {
        norm_sampled_rows(step, layer.mlp_output_norm, first, until(step.batch.num_sampled));
        show_rows(step, layer.mlp_output_norm, first - step.batch.num_sampled,
                  until(step.batch.num_sampled + step.batch.num_shown) - step.batch.num_sampled);
      }
      break;
    case Phase::shrink_qkv:
    case Phase::shrink_output:
    case Phase::shrink_gate_up:
    case Phase::shrink_down: shrink_run(step, phase, layer_index, chunk); break;
    case Phase::head: head_chunk(step, chunk, thread); break;
    case Phase::pick: argmax_row(step, chunk); break;
    case Phase::latent_rows:
    case Phase::query_up:
    case Phase::split_queries:
    case Phase::absorb:
    case Phase::value_up:
    case Phase::attended_rows: run_latent_chunk(step, phase, layer, layer_index, chunk, thread); break;
    default: run_mixture_chunk(step, phase, layer.mixture, chunk, thread); break;
  }
}

static size_t scratch_bytes(const Model& m) {
  size_t max_bytes = attention_bytes(m.heads / m.kv_heads, m.key_dim());
  const auto consider = [&](const Matrix& matrix) {
    const size_t bytes = unpacked_bytes(matrix);
    if (bytes > max_bytes) max_bytes = bytes;
  };
  consider(m.head);
  for (int i = 0; i < m.num_layers; ++i) {
    consider(m.layers[i].qkv);
    consider(m.layers[i].query_up);
    consider(m.layers[i].absorb);
    consider(m.layers[i].value_up);
    consider(m.layers[i].output);
    consider(m.layers[i].gate_up);
    consider(m.layers[i].down);
    const Mixture& mixture = m.layers[i].mixture;
    consider(mixture.router);
    for (int e = 0; e < mixture.count + (mixture.has_shared ? 1 : 0); ++e) {
      consider(mixture.experts[e].gate_up);
      consider(mixture.experts[e].down);
    }
  }
  return max_bytes;
}

}  // namespace kvferry::KVFERRY_LEVEL
