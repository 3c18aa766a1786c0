#include "step/step.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>

namespace kvferry {
namespace {

// attention items per thread in prefill; if there are fewer, items get half as many queries
constexpr int kMinItemsPerThread = 4;
constexpr int kMaxSplitQueries = 4;  // sequences with at most this many rows are split by partition
// rows per chunk, which share fetched and unpacked panels; a multiple of the rows per tile
constexpr int kMaxChunkRows = 258;
constexpr int kMatrixUnitInputs = 384 << 10;  // inputs of all rows of a chunk with AMX; they fit the L2 cache
constexpr int kMinRowsPerThread = 128;        // minimum rows per thread for row affinity
constexpr int kMinChunkRows = 24;             // with fewer rows, fetching panels costs more than multiplying them
constexpr int kChunkCells = 2048;             // target of rows times panels per chunk
constexpr int kFewRows = 2;                   // short products, where claiming a chunk costs as much as half a panel
constexpr int kRunRows = 4;                   // rows with the same adapter that a thread shrinks together
constexpr int kHeadRows = 64;                 // rows per chunk of a per-head product

int round_up(int n, int to) { return (n + to - 1) / to * to; }
int ceil_div(int n, int of) { return (n + of - 1) / of; }

// Panels per chunk for few rows, a multiple of `least`: minimizes the finish time of the busiest thread, with at least
// three chunks per thread, since other processes may use a core.
int panels_for_few_rows(int panels, int threads, int least) {
  int best = least;
  const auto cost = [=](int each) { return ceil_div(ceil_div(panels, each), threads) * (2 * each + 1); };
  for (int each = 2 * least; each <= std::min(32, ceil_div(panels, 3 * threads)); each += least)
    if (cost(each) <= cost(best)) best = each;
  return best;
}

// Whether each thread computes the same rows in all phases, so that they stay in its L2 cache.
bool has_row_affinity(const Level& level, int rows, int threads) {
  return level.has_matrix_unit && threads > 1 && rows >= threads * kMinRowsPerThread;
}

}  // namespace

Step::Step(const Model& m, const Level& l, int threads, Ranks* r) : model(m), level(l), ranks(r), threads_(threads) {
  scratches_.resize(size_t(threads));
  seconds.resize(size_t(threads));
  for (auto& scratch : scratches_) scratch.reserve(level.scratch_bytes(model));
  const auto forms_of = [this](const Matrix& matrix) { return level.input_forms(matrix, model.input_bits); };
  x_forms_ = forms_of(model.head);
  for (int i = 0; i < model.num_layers; ++i) {
    const Layer& layer = model.layers[i];
    x_forms_ = x_forms_ | forms_of(layer.qkv);
    attended_forms_ = attended_forms_ | forms_of(layer.output);
    if (model.latent.rank) {
      if (model.latent.query_rank) query_forms_ = query_forms_ | forms_of(layer.query_up);
      absorb_forms_ = absorb_forms_ | forms_of(layer.absorb);
      attended_latent_forms_ = attended_latent_forms_ | forms_of(layer.value_up);
    }
    const Mixture& mixture = layer.mixture;
    if (!mixture.count) {
      if (first_dense_ < 0) first_dense_ = i;
      x_forms_ = x_forms_ | forms_of(layer.gate_up);
      up_forms_ = up_forms_ | forms_of(layer.down);
    } else {
      if (first_mixture_ < 0) first_mixture_ = i;
      const int shared = mixture.has_shared ? 1 : 0;
      max_per_row_ = std::max(max_per_row_, mixture.active + shared);
      max_experts_ = std::max(max_experts_, mixture.count + shared);
      x_forms_ = x_forms_ | forms_of(mixture.router);
      for (int e = 0; e < mixture.count + shared; ++e) {
        x_forms_ = x_forms_ | forms_of(mixture.experts[e].gate_up);
        expert_up_forms_ = expert_up_forms_ | forms_of(mixture.experts[e].down);
        max_expert_inputs_ = std::max(max_expert_inputs_, mixture.experts[e].down.cols);
      }
    }
    has_windows_ = has_windows_ || layer.window > 0;
    has_output_norms_ = has_output_norms_ || layer.attention_output_norm || layer.mlp_output_norm;
  }
}

int row_floats(int width) {
  // Padding inputs are multiplied by zero weights and must be finite, so writers fill the whole stride of a row.
  const int stride = round_up(width, kGroup);
  return stride / kGroup % 2 ? stride : stride + kGroup;  // avoids cache set conflicts between rows
}

Rows Step::allocate_rows(Buffer& buffer, int rows, int width, InputForms forms) {
  const int stride = row_floats(width);
  auto* memory = static_cast<uint8_t*>(buffer.reserve(Rows::memory_bytes(rows, stride, forms)));
  return Rows::over(memory, rows, stride, forms);
}

Blocking choose_blocking(const Level& level, const Matrix& matrix, int rows, int threads, int least) {
  Blocking c;
  if (rows == 0) return c;
  const int max_rows = level.has_matrix_unit
                           ? std::max(kMatrixUnitInputs / matrix.depth / level.tile_rows, 1) * level.tile_rows
                           : kMaxChunkRows;
  // Use enough chunks that no thread idles for long at the end of the phase, but few enough that claiming them is
  // cheap.
  int row_blocks = ceil_div(rows, max_rows);
  if (has_row_affinity(level, rows, threads)) row_blocks = round_up(row_blocks, threads);
  while (ceil_div(matrix.panels, 4) * row_blocks < 8 * threads && rows >= (row_blocks + 1) * kMinChunkRows)
    ++row_blocks;
  c.rows = row_blocks == 1 ? rows : round_up(ceil_div(rows, row_blocks), level.tile_rows);
  row_blocks = ceil_div(rows, c.rows);
  if (rows <= kFewRows) {
    c.panels = panels_for_few_rows(matrix.panels, threads, least);
  } else {
    const int panels = std::min(matrix.panels / std::max(1, threads * 8 / row_blocks), kChunkCells / c.rows);
    c.panels = std::clamp(panels >= 4 ? panels / 4 * 4 : 2, least, 32);
  }
  c.row_blocks = row_blocks;
  c.panel_blocks = ceil_div(matrix.panels, c.panels);
  c.count = row_blocks * c.panel_blocks;
  c.rows_first = level.has_matrix_unit;
  return c;
}

void Step::prepare(const Batch& b) {
  batch = b;
  const int rows = std::max(batch.rows, 1);
  const int capacity = round_up(rows, 64);  // batches of similar size share one memory layout
  x = allocate_rows(x_, capacity, std::max(model.hidden, model.inputs), x_forms_);
  attended = allocate_rows(attended_, capacity, model.attended_width(), attended_forms_);
  if (first_dense_ >= 0) hidden_up = allocate_rows(up_, capacity, round_up(model.intermediate, kPanel), up_forms_);
  residual = static_cast<float*>(residual_.reserve(size_t(capacity) * x.stride * 4));
  if (has_output_norms_ || ranks) projected = static_cast<float*>(projected_.reserve(size_t(capacity) * x.stride * 4));
  qkv = static_cast<float*>(qkv_.reserve(size_t(capacity) * model.layers[0].qkv.panels * kPanel * 4));
  qkv_blocking = choose_blocking(level, model.layers[0].qkv, batch.rows, threads_);
  output_blocking = choose_blocking(level, model.layers[0].output, batch.rows, threads_);
  // A gate panel and its up panel produce 16 inputs of `down`. A group of 32 inputs needs two such pairs from one
  // thread.
  if (first_dense_ >= 0) {
    gate_up_blocking = choose_blocking(level, model.layers[first_dense_].gate_up, batch.rows, threads_, 4);
    down_blocking = choose_blocking(level, model.layers[first_dense_].down, batch.rows, threads_);
  }
  head_blocking = choose_blocking(level, model.head, batch.num_sampled, threads_);
  row_chunk = batch.rows <= 8 ? 8 : std::clamp(ceil_div(batch.rows, threads_ * 4), 4, 32);
  row_affinity_ = has_row_affinity(level, batch.rows, threads_);
  if (row_affinity_) {
    const size_t cursors = size_t(phases()) * size_t(threads_);
    if (cursors > cursors_.size()) cursors_ = std::vector<Cursor>(cursors);
    for (Cursor& cursor : cursors_) cursor.taken.store(0, std::memory_order_relaxed);
  }
  plan_adapters(capacity);
  plan_experts(capacity);
  plan_latent(capacity);
  plan_attention();
}

// Allocates the memory of MoE layers, which are planned while the step runs.
void Step::plan_experts(int capacity) {
  if (first_mixture_ < 0) return;
  const Matrix& router = model.layers[first_mixture_].mixture.router;
  const int entries = capacity * max_per_row_;
  experts.clear(batch.rows, max_per_row_, max_experts_);
  router_logits = static_cast<float*>(router_.reserve(size_t(capacity) * size_t(router.panels) * kPanel * 4));
  router_blocking = choose_blocking(level, router, batch.rows, threads_);
  expert_x = allocate_rows(expert_x_, batch.rows > 1 ? entries : 1, model.hidden, x_forms_);
  expert_up = allocate_rows(expert_up_, entries, round_up(max_expert_inputs_, kPanel), expert_up_forms_);
  expert_out = static_cast<float*>(expert_out_.reserve(size_t(entries) * size_t(x.stride) * 4));
}

// Allocates the memory of latent attention.
void Step::plan_latent(int capacity) {
  const Latent& latent = model.latent;
  if (!latent.rank) return;
  const auto reserve = [&](Buffer& buffer, int width) {
    return static_cast<float*>(buffer.reserve(size_t(capacity) * size_t(width) * 4));
  };
  if (latent.query_rank) {
    query_x = allocate_rows(query_x_, capacity, latent.query_rank, query_forms_);
    query_blocking = choose_blocking(level, model.layers[0].query_up, batch.rows, threads_);
    queries = reserve(queries_, model.layers[0].query_up.panels * kPanel);
  }
  absorb_x = allocate_rows(absorb_x_, capacity, model.heads * latent.plain, absorb_forms_);
  absorbed = reserve(absorbed_, model.heads * latent.width());
  attended_latent = allocate_rows(attended_latent_, capacity, model.heads * latent.rank, attended_latent_forms_);
  head_row_blocks = ceil_div(batch.rows, kHeadRows);
  head_rows = ceil_div(batch.rows, head_row_blocks);
  if (head_row_blocks > 1) head_rows = round_up(head_rows, level.tile_rows);
  head_row_blocks = ceil_div(batch.rows, head_rows);
}

// Sorts the rows with adapters by adapter, and splits them into runs.
void Step::plan_adapters(int capacity) {
  adapted_rows.clear();
  adapter_runs.clear();
  if (!batch.num_adapters) return;
  int max_rank = 1;
  for (int a = 0; a < batch.num_adapters; ++a) {
    max_rank = std::max(max_rank, batch.adapters[a]->max_rank);
    for (int row = 0; row < batch.rows; ++row) {
      if (batch.adapter_of_row[row] != a) continue;
      const int at = int(adapted_rows.size());
      adapted_rows.push_back(row);
      if (adapter_runs.empty() || adapter_runs.back().adapter != a || adapter_runs.back().count == kRunRows)
        adapter_runs.push_back({a, at, 0});
      ++adapter_runs.back().count;
    }
  }
  shrunk_stride = round_up(max_rank, kPanel);
  shrunk = static_cast<float*>(shrunk_.reserve(size_t(capacity) * size_t(shrunk_stride) * 4));
}

int Step::claim_chunk(int index, int thread) {
  const int count = chunks(index);
  for (int i = 0;; ++i) {
    const int owner = (thread + i) % threads_;
    const int first = int(int64_t(count) * owner / threads_), end = int(int64_t(count) * (owner + 1) / threads_);
    const int taken =
        cursors_[size_t(index) * size_t(threads_) + size_t(owner)].taken.fetch_add(1, std::memory_order_relaxed);
    if (first + taken < end) return first + taken;
  }
}

void Step::plan_attention() {
  items.clear();
  sharers.clear();
  next_sharer_.assign(size_t(batch.num_sequences), -1);
  first_partial.assign(size_t(batch.num_sequences), -1);
  const int group = model.heads / model.kv_heads, max_queries = tile_queries(group);
  // All KV heads of a page are adjacent in memory. If there are enough sequences to occupy all threads, an item reads
  // all heads.
  const int heads_at_once = batch.num_sequences >= 4 * threads_ ? model.kv_heads : 1;
  int partials_used = 0, max_split = 1, max_parts = 0;
  for (int s = 0; s < batch.num_sequences; ++s) {
    const Sequence& q = batch.sequences[s];
    const int parts = ceil_div(q.context, kPartition);
    if (q.queries <= std::min(kMaxSplitQueries, max_queries) && parts > 1) {
      first_partial[size_t(s)] = partials_used;
      partials_used += parts * model.kv_heads;
      max_split = std::max(max_split, q.queries);
      max_parts = std::max(max_parts, parts);
      continue;
    }
    const int items_with_full_tiles = ceil_div(q.queries, max_queries) * ceil_div(model.kv_heads, heads_at_once);
    const bool are_few = items_with_full_tiles < kMinItemsPerThread * threads_;
    const int per_item = are_few ? std::max(1, max_queries / 2) : max_queries;
    for (int first = (q.queries - 1) / per_item * per_item; first >= 0; first -= per_item) {  // most expensive first
      const int queries = std::min(per_item, q.queries - first);
      const int end = ceil_div(q.context - q.queries + first + queries, kPartition);
      for (int h = 0; h < model.kv_heads; h += heads_at_once)
        items.push_back({s, h, std::min(h + heads_at_once, model.kv_heads), first, queries, 0, end, -1});
    }
  }
  // A shared item runs on one thread, so sharing is limited to leave at least two items per thread.
  const int groups = ceil_div(2 * threads_, std::max(1, max_parts * model.kv_heads));
  const int max_sharers = std::min(max_queries, std::max(4, ceil_div(batch.num_sequences, groups)));
  for (int p = 0; p < max_parts; ++p) plan_partition(p, heads_at_once, max_sharers);
  partial_floats = max_split * group * (model.value_dim() + 2);
  partials = static_cast<float*>(partials_.reserve(size_t(std::max(1, partials_used)) * partial_floats * 4));
}

// Plans the items of a partition of the split sequences. Decoding sequences with the same pages in the partition
// (shared prompt prefixes) become rows of one item, so that keys and values are read and packed once for all of them
// (Juravsky et al., Hydragen, 2024). A row's arithmetic is the same with and without sharing.
void Step::plan_partition(int partition, int heads_at_once, int max_sharers) {
  const int first = partition * kPartition / batch.block_tokens,
            last = ((partition + 1) * kPartition - 1) / batch.block_tokens;
  const auto add = [&](int s, int queries, int step, int where) {
    for (int h = 0; h < model.kv_heads; h += step)
      items.push_back({s, h, std::min(h + step, model.kv_heads), 0, queries, partition, partition + 1, where});
  };
  shared_partitions_.clear();
  for (int s = 0; s < batch.num_sequences; ++s) {
    const Sequence& q = batch.sequences[s];
    if (first_partial[size_t(s)] < 0 || partition * kPartition >= q.context) continue;
    // Sequences that share a partition must attend to all of it, which is not the case with windows.
    if (q.queries > 1 || q.context < (partition + 1) * kPartition || has_windows_) {
      add(s, q.queries, heads_at_once, -1);
      continue;
    }
    const auto found =
        std::find_if(shared_partitions_.begin(), shared_partitions_.end(), [&](const SharedPartition& sharing) {
          return sharing.page == q.pages[last] && sharing.count < max_sharers &&
                 std::equal(q.pages + first, q.pages + last, batch.sequences[sharing.first].pages + first);
        });
    if (found == shared_partitions_.end()) {
      shared_partitions_.push_back({q.pages[last], s, s, 1});
      continue;
    }
    next_sharer_[size_t(found->last)] = s;
    found->last = s;
    ++found->count;
  }
  for (const SharedPartition& sharing : shared_partitions_) {
    if (sharing.count == 1) {
      add(sharing.first, 1, heads_at_once, -1);
      continue;
    }
    const int where = int(sharers.size());
    for (int s = sharing.first, i = 0; i < sharing.count; s = next_sharer_[size_t(s)], ++i) sharers.push_back(s);
    add(sharing.first, sharing.count, 1, where);
  }
}

int Step::phases() const {
  const int each = layer_phases(batch.num_adapters > 0, first_mixture_ >= 0, model.latent.rank > 0).count;
  return kNumFirst + each * model.num_layers + (batch.num_sampled ? kNumLast : 0);
}

int Step::chunks(int index) const {
  int layer;
  const Phase phase = phase_at(index, layer_phases(batch.num_adapters > 0, first_mixture_ >= 0, model.latent.rank > 0),
                               model.num_layers, layer);
  const bool has_experts = model.layers[layer].mixture.count > 0;
  switch (phase) {
    case Phase::qkv: return qkv_blocking.count;
    case Phase::attend: return int(items.size());
    case Phase::output: return output_blocking.count;
    case Phase::gate_up: return has_experts ? 0 : gate_up_blocking.count;
    case Phase::down: return has_experts ? 0 : down_blocking.count;
    case Phase::route: return has_experts ? router_blocking.count : 0;
    case Phase::plan_experts: return has_experts ? 1 : 0;
    case Phase::gather:
      return has_experts && experts.has_gathered ? ceil_div(batch.rows * experts.per_row, row_chunk) : 0;
    case Phase::expert_gate_up: return has_experts ? experts.chunks(&ExpertRun::gate_up_end) : 0;
    case Phase::expert_down: return has_experts ? experts.chunks(&ExpertRun::down_end) : 0;
    case Phase::combine: return has_experts ? ceil_div(batch.rows, row_chunk) : 0;
    case Phase::query_up: return model.latent.query_rank ? query_blocking.count : 0;
    case Phase::absorb:
    case Phase::value_up: return model.heads * head_row_blocks;
    case Phase::shrink_gate_up:
    case Phase::shrink_down: return has_experts ? 0 : int(adapter_runs.size());
    case Phase::shrink_qkv:
    case Phase::shrink_output: return int(adapter_runs.size());
    case Phase::head: return head_blocking.count;
    case Phase::pick: return ranks && ranks->rank() ? 0 : batch.num_sampled;
    case Phase::meet: return ranks ? 1 : 0;
    case Phase::embedded: return ranks ? ceil_div(batch.rows, row_chunk) : 0;
    case Phase::next_norm:
      if (layer + 1 == model.num_layers) return ceil_div(batch.num_sampled + batch.num_shown, row_chunk);
      [[fallthrough]];
    default: return ceil_div(batch.rows, row_chunk);
  }
}

void Step::run(int index, int chunk, int thread) {
  int layer;
  const Phase phase = phase_at(index, layer_phases(batch.num_adapters > 0, first_mixture_ >= 0, model.latent.rank > 0),
                               model.num_layers, layer);
  if (row_affinity_ && phase != Phase::attend && phase < Phase::head) chunk = claim_chunk(index, thread);
  const auto compute = [&] {
    if (phase == Phase::plan_experts) {
      const Mixture& mixture = model.layers[layer].mixture;
      experts.plan(mixture, level, router_logits, mixture.router.panels * kPanel, batch.rows, threads_);
    } else if (phase == Phase::meet) {
      ranks->meet();
    } else {
      level.run(*this, phase, layer, chunk, thread);
    }
  };
  if (!is_timed) return compute();
  const auto begun = std::chrono::steady_clock::now();
  compute();
  seconds[size_t(thread)][size_t(phase)] +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

}  // namespace kvferry
