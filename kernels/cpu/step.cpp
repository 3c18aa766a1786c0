#include "step.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace kvferry {
namespace {

constexpr int kLeastItems = 4;    // of a prompt's attention for each thread; else items have half as many queries
constexpr int kSplitQueries = 4;  // sequences with at most so many rows are shared out by partition
constexpr int kRowBlock = 258;    // rows of a product's chunk, at most; a multiple of a tile's: they share what was fetched or unpacked
constexpr int kUnitInputs = 384 << 10;  // of a chunk's rows together, at most, where a matrix unit reads them: they stay in a core's own cache
constexpr int kOwnRows = 128;     // of each thread, at least, for it to keep them
constexpr int kLeastRows = 24;    // about at least, where there are more: below, fetching panels outweighs using them
constexpr int kChunkCells = 2048; // rows times panels of a chunk, about
constexpr int kFewRows = 2;       // whose products are over so soon that handing out a chunk takes half as long as a panel of it
constexpr int kPerLayer = 9;      // phases
constexpr size_t kHuge = size_t(2) << 20;
#if defined(KVFERRY_POISON)
constexpr bool kPoisons = true;  // kvferry_check: what a step reads, it must have written
#else
constexpr bool kPoisons = false;
#endif

int round_up(int n, int to) { return (n + to - 1) / to * to; }
int pieces(int n, int of) { return (n + of - 1) / of; }

// Panels of a chunk of few rows, a multiple of `least`: so many that the busiest thread is done soonest, and three chunks a
// thread at least, because another process may take its core.
int panels_of_few(int panels, int threads, int least) {
  int best = least;
  const auto cost = [=](int each) { return pieces(pieces(panels, each), threads) * (2 * each + 1); };
  for (int each = 2 * least; each <= std::min(32, pieces(panels, 3 * threads)); each += least)
    if (cost(each) <= cost(best)) best = each;
  return best;
}

// Whether a thread computes the same rows in all phases, so that they stay in its core's own cache.
bool keeps_rows(const Level& level, int rows, int threads) { return level.has_unit && threads > 1 && rows >= threads * kOwnRows; }

}  // namespace

Buffer::~Buffer() { std::free(data_); }
Buffer::Buffer(Buffer&& other) noexcept : data_(other.data_), bytes_(other.bytes_) {
  other.data_ = nullptr;
  other.bytes_ = 0;
}

void* Buffer::reserve(size_t bytes) {
  if (bytes <= bytes_) {
    if (kPoisons) std::memset(data_, 0xff, bytes_);
    return data_;
  }
  std::free(data_);
  data_ = nullptr;
  bytes_ = 0;
  const size_t alignment = bytes >= kHuge ? kHuge : 64, rounded = (bytes + alignment - 1) / alignment * alignment;
  data_ = static_cast<uint8_t*>(std::aligned_alloc(alignment, rounded));
  if (!data_) throw std::bad_alloc();
#if defined(__linux__)
  if (alignment == kHuge) madvise(data_, rounded, MADV_HUGEPAGE);
#endif
  std::memset(data_, kPoisons ? 0xff : 0, rounded);
  bytes_ = rounded;
  return data_;
}

Step::Step(const Model& m, const Level& l, int threads) : model(m), level(l), threads_(threads) {
  scratches_.resize(size_t(threads));
  seconds.resize(size_t(threads));
  for (auto& scratch : scratches_) scratch.reserve(level.scratch_bytes(model));
  const auto read_by = [this](const Matrix& matrix) { return level.forms_read(matrix, model.input_bits); };
  x_forms_ = read_by(model.head);
  for (int i = 0; i < model.num_layers; ++i) {
    const Layer& layer = model.layers[i];
    x_forms_ = x_forms_ | read_by(layer.qkv) | read_by(layer.gate_up);
    attended_forms_ = attended_forms_ | read_by(layer.output);
    up_forms_ = up_forms_ | read_by(layer.down);
  }
}

Rows Step::rows_of(Buffer& buffer, int rows, int width, Forms forms) {
  // Inputs beyond a matrix's own are multiplied by zeros, so they must be finite: who fills a row fills all of it.
  int stride = round_up(width, kGroup);
  if (stride / kGroup % 2 == 0) stride += kGroup;  // else what stands below each other falls into few sets of a cache
  auto* memory = static_cast<uint8_t*>(buffer.reserve(Rows::memory_of(rows, stride, forms)));
  return Rows::over(memory, rows, stride, forms);
}

Cut cut_product(const Level& level, const Matrix& matrix, int rows, int threads, int least) {
  Cut c;
  if (rows == 0) return c;
  const int most_rows = level.has_unit ? std::max(kUnitInputs / matrix.depth / level.tile_rows, 1) * level.tile_rows : kRowBlock;
  // Enough chunks that nobody waits long for the last one, and not so many that handing them out costs.
  int row_blocks = pieces(rows, most_rows);
  if (keeps_rows(level, rows, threads)) row_blocks = round_up(row_blocks, threads);
  while (pieces(matrix.panels, 4) * row_blocks < 8 * threads && rows >= (row_blocks + 1) * kLeastRows) ++row_blocks;
  c.rows = row_blocks == 1 ? rows : round_up(pieces(rows, row_blocks), level.tile_rows);
  row_blocks = pieces(rows, c.rows);
  if (rows <= kFewRows) {
    c.panels = panels_of_few(matrix.panels, threads, least);
  } else {
    const int panels = std::min(matrix.panels / std::max(1, threads * 8 / row_blocks), kChunkCells / c.rows);
    c.panels = std::clamp(panels >= 4 ? panels / 4 * 4 : 2, least, 32);
  }
  c.row_blocks = row_blocks;
  c.panel_blocks = pieces(matrix.panels, c.panels);
  c.count = row_blocks * c.panel_blocks;
  c.rows_first = level.has_unit;
  return c;
}

void Step::prepare(const Batch& b) {
  batch = b;
  const int rows = std::max(batch.rows, 1);
  const int capacity = round_up(rows, 64);  // so that batches of about one size share their memory's layout
  x = rows_of(x_, capacity, model.hidden, x_forms_);
  attended = rows_of(attended_, capacity, model.heads * model.head_dim, attended_forms_);
  hidden_up = rows_of(up_, capacity, round_up(model.intermediate, kPanel), up_forms_);
  residual = static_cast<float*>(residual_.reserve(size_t(capacity) * x.stride * 4));
  qkv = static_cast<float*>(qkv_.reserve(size_t(capacity) * model.layers[0].qkv.panels * kPanel * 4));
  cut_qkv = cut_product(level, model.layers[0].qkv, batch.rows, threads_);
  cut_output = cut_product(level, model.layers[0].output, batch.rows, threads_);
  // A gate and its up make 16 inputs of `down`; a group has two of these, and one owner.
  cut_gate_up = cut_product(level, model.layers[0].gate_up, batch.rows, threads_, 4);
  cut_down = cut_product(level, model.layers[0].down, batch.rows, threads_);
  cut_head = cut_product(level, model.head, batch.num_sampled, threads_);
  row_chunk = batch.rows <= 8 ? 8 : std::clamp(pieces(batch.rows, threads_ * 4), 4, 32);
  keeps_rows_ = keeps_rows(level, batch.rows, threads_);
  if (keeps_rows_) {
    const size_t cursors = size_t(phases()) * size_t(threads_);
    if (cursors > cursors_.size()) cursors_ = std::vector<Cursor>(cursors);
    for (Cursor& cursor : cursors_) cursor.taken.store(0, std::memory_order_relaxed);
  }
  plan_attention();
}

int Step::claim(int index, int thread) {
  const int count = chunks(index);
  for (int i = 0;; ++i) {
    const int owner = (thread + i) % threads_;
    const int first = int(int64_t(count) * owner / threads_), end = int(int64_t(count) * (owner + 1) / threads_);
    const int taken = cursors_[size_t(index) * size_t(threads_) + size_t(owner)].taken.fetch_add(1, std::memory_order_relaxed);
    if (first + taken < end) return first + taken;
  }
}

void Step::plan_attention() {
  items.clear();
  sharers.clear();
  next_sharer_.assign(size_t(batch.num_sequences), -1);
  first_partial.assign(size_t(batch.num_sequences), -1);
  const int group = model.heads / model.kv_heads, most_queries = tile_queries(group);
  // All KV heads of a page lie together. Where there are sequences enough to share out, an item reads them all.
  const int heads_at_once = batch.num_sequences >= 4 * threads_ ? model.kv_heads : 1;
  int partials_used = 0, most_split = 1, most_parts = 0;
  for (int s = 0; s < batch.num_sequences; ++s) {
    const Sequence& q = batch.sequences[s];
    const int parts = pieces(q.context, kPartition);
    if (q.queries <= std::min(kSplitQueries, most_queries) && parts > 1) {
      first_partial[size_t(s)] = partials_used;
      partials_used += parts * model.kv_heads;
      most_split = std::max(most_split, q.queries);
      most_parts = std::max(most_parts, parts);
      continue;
    }
    const int items_of_most = pieces(q.queries, most_queries) * pieces(model.kv_heads, heads_at_once);
    const bool are_few = items_of_most < kLeastItems * threads_;
    const int most = are_few ? std::max(1, most_queries / 2) : most_queries;
    for (int first = (q.queries - 1) / most * most; first >= 0; first -= most) {  // the longest first
      const int queries = std::min(most, q.queries - first);
      const int end = pieces(q.context - q.queries + first + queries, kPartition);
      for (int h = 0; h < model.kv_heads; h += heads_at_once)
        items.push_back({s, h, std::min(h + heads_at_once, model.kv_heads), first, queries, 0, end, -1});
    }
  }
  // Who shares an item is computed by one thread: as many items are left as give all threads two each.
  const int groups = pieces(2 * threads_, std::max(1, most_parts * model.kv_heads));
  const int most_sharers = std::min(most_queries, std::max(4, pieces(batch.num_sequences, groups)));
  for (int p = 0; p < most_parts; ++p) plan_partition(p, heads_at_once, most_sharers);
  partial_floats = most_split * group * (model.head_dim + 2);
  partials = static_cast<float*>(partials_.reserve(size_t(std::max(1, partials_used)) * partial_floats * 4));
}

// Items of one partition of the sequences that are cut. Those that decode and have the same pages there, because their
// prompts begin alike, become rows of one item, so that keys and values are read and packed once for all of them
// (Juravsky et al., Hydragen, 2024). A row's arithmetic is the same either way.
void Step::plan_partition(int partition, int heads_at_once, int most_sharers) {
  const int first = partition * kPartition / batch.block_tokens, last = ((partition + 1) * kPartition - 1) / batch.block_tokens;
  const auto add = [&](int s, int queries, int step, int where) {
    for (int h = 0; h < model.kv_heads; h += step)
      items.push_back({s, h, std::min(h + step, model.kv_heads), 0, queries, partition, partition + 1, where});
  };
  sharings_.clear();
  for (int s = 0; s < batch.num_sequences; ++s) {
    const Sequence& q = batch.sequences[s];
    if (first_partial[size_t(s)] < 0 || partition * kPartition >= q.context) continue;
    if (q.queries > 1 || q.context < (partition + 1) * kPartition) {
      add(s, q.queries, heads_at_once, -1);
      continue;
    }
    const auto found = std::find_if(sharings_.begin(), sharings_.end(), [&](const Sharing& sharing) {
      return sharing.page == q.pages[last] && sharing.count < most_sharers &&
             std::equal(q.pages + first, q.pages + last, batch.sequences[sharing.first].pages + first);
    });
    if (found == sharings_.end()) {
      sharings_.push_back({q.pages[last], s, s, 1});
      continue;
    }
    next_sharer_[size_t(found->last)] = s;
    found->last = s;
    ++found->count;
  }
  for (const Sharing& sharing : sharings_) {
    if (sharing.count == 1) {
      add(sharing.first, 1, heads_at_once, -1);
      continue;
    }
    const int where = int(sharers.size());
    for (int s = sharing.first, i = 0; i < sharing.count; s = next_sharer_[size_t(s)], ++i) sharers.push_back(s);
    add(sharing.first, sharing.count, 1, where);
  }
}

int Step::phases() const { return 1 + kPerLayer * model.num_layers + (batch.num_sampled ? 2 : 0); }

static Phase phase_at(int index, int num_layers, int& layer) {
  layer = 0;
  if (index == 0) return Phase::embed;
  const int inner = index - 1;
  if (inner >= kPerLayer * num_layers) return inner == kPerLayer * num_layers ? Phase::head : Phase::pick;
  layer = inner / kPerLayer;
  return Phase(int(Phase::qkv) + inner % kPerLayer);
}

int Step::chunks(int index) const {
  int layer;
  switch (phase_at(index, model.num_layers, layer)) {
    case Phase::qkv: return cut_qkv.count;
    case Phase::attend: return int(items.size());
    case Phase::output: return cut_output.count;
    case Phase::gate_up: return cut_gate_up.count;
    case Phase::down: return cut_down.count;
    case Phase::head: return cut_head.count;
    case Phase::pick: return batch.num_sampled;
    case Phase::next_norm:
      if (layer + 1 == model.num_layers) return pieces(batch.num_sampled, row_chunk);
      [[fallthrough]];
    default: return pieces(batch.rows, row_chunk);
  }
}

void Step::run(int index, int chunk, int thread) {
  int layer;
  const Phase phase = phase_at(index, model.num_layers, layer);
  if (keeps_rows_ && phase != Phase::attend && phase < Phase::head) chunk = claim(index, thread);
  if (!is_timed) {
    level.run(*this, phase, layer, chunk, thread);
    return;
  }
  const auto begun = std::chrono::steady_clock::now();
  level.run(*this, phase, layer, chunk, thread);
  seconds[size_t(thread)][size_t(phase)] += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

}  // namespace kvferry
