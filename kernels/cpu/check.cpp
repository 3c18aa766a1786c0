// Sanitizer program (`make sanitize`): runs random batches through small random models of every weight format, with
// several threads, on every level. The exit status is 1 if a row's logits differ from the logits that a single thread
// computes for this sequence alone. Buffers are poisoned before every step.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "data/batch.hpp"
#include "data/matrix.hpp"
#include "data/model.hpp"
#include "runtime/pool.hpp"
#include "runtime/ranks.hpp"
#include "attention/item.hpp"
#include "step/level.hpp"
#include "step/step.hpp"
#include "levels/levels.hpp"
#include "check_world.hpp"

using namespace kvferry;

namespace {

struct Piece {
  int sequence, first, rows;
  bool is_tree = false;  // whether the rows are described as a tree, in which each row is the parent of the next one
};

// Layer groups of the test's two-layer model, and the pages of each sequence in each group.
struct Groups {
  std::vector<int64_t> places;  // empty for pages with both layers
  std::vector<std::vector<std::vector<int64_t>>> tables;
  int page_layers() const { return places.empty() ? 2 : 1; }
};

// Pages from `page` on. If the layers are in two groups, each page holds one layer.
Groups random_groups(const std::vector<int>& lengths, int block_tokens, int64_t& page) {
  Groups groups;
  if (draw(0, 1)) groups.places = draw(0, 1) ? std::vector<int64_t>{0, 0, 1, 0} : std::vector<int64_t>{1, 0, 0, 0};
  groups.tables.resize(groups.places.empty() ? 1 : 2);
  for (auto& tables : groups.tables)
    for (int length : lengths) {
      tables.emplace_back();
      for (int i = 0; i * block_tokens < length; ++i) tables.back().push_back(page++);
    }
  return groups;
}

// Computes a step; returns the logits of each row, and its inputs of both layers.
std::vector<float> step(Step& job, Pool& pool, const std::vector<Piece>& pieces,
                        const std::vector<std::vector<int64_t>>& tokens, const Groups& groups,
                        std::vector<uint8_t>& pages, KvType kv_type, int block_tokens) {
  std::vector<int64_t> ids, positions, sampled;
  std::vector<int64_t> slots[2];
  std::vector<uint64_t> paths;
  size_t width = 0;
  for (const Piece& p : pieces) width = std::max(width, size_t((p.first + p.rows + block_tokens - 1) / block_tokens));
  std::vector<int64_t> tables(groups.tables.size() * pieces.size() * width, -1);
  std::vector<Sequence> sequences;
  for (const Piece& p : pieces) {
    const int64_t* table = tables.data() + sequences.size() * width;
    for (size_t g = 0; g < groups.tables.size(); ++g) {
      const auto& pages_of = groups.tables[g][size_t(p.sequence)];
      int64_t* to = tables.data() + (g * pieces.size() + sequences.size()) * width;
      for (int i = p.first; i < p.first + p.rows; ++i)
        slots[g].push_back(pages_of[size_t(i / block_tokens)] * block_tokens + i % block_tokens);
      // Pages that no layer of the group attends to any more, because of its sliding window, get no valid id.
      int hidden = kLongest;
      for (int layer = 0; layer < 2; ++layer)
        if (groups.places.empty() || groups.places[2 * size_t(layer)] == int64_t(g))
          hidden = std::min(hidden, hidden_tokens(job.model.layers[layer].window, p.first));
      for (int i = hidden / block_tokens; i * block_tokens < p.first + p.rows; ++i) to[i] = pages_of[size_t(i)];
    }
    sequences.push_back({int(ids.size()), p.rows, p.first + p.rows, table, p.is_tree ? p.rows : 0});
    for (int i = 0; i < p.rows; ++i) paths.push_back(p.is_tree ? ~uint64_t(0) >> (63 - i) : 0);
    for (int i = p.first; i < p.first + p.rows; ++i) {
      sampled.push_back(int64_t(ids.size()));
      ids.push_back(tokens[size_t(p.sequence)][size_t(i)]);
      positions.push_back(i);
    }
  }
  const size_t n = ids.size();
  const int64_t taps[] = {1, 0};
  const size_t vocabulary = size_t(job.model.vocabulary), tapped_size = 2 * size_t(job.model.hidden);
  std::vector<float> logits(n * vocabulary), tapped(n * tapped_size), all;
  std::vector<int64_t> greedy(n);
  std::vector<uint8_t> finite(n);
  Batch b;
  b.rows = b.num_sampled = int(n);
  b.tokens = ids.data();
  b.positions = positions.data();
  b.slots = slots[0].data();
  if (!groups.places.empty()) {
    b.places = groups.places.data();
    b.page_layers = groups.page_layers();
    b.further_slots = slots[1].data();
    b.further_tables = tables.data() + pieces.size() * width;
    b.table_width = width;
  }
  b.sequences = sequences.data();
  b.paths = paths.data();
  b.num_sequences = int(sequences.size());
  b.sampled = sampled.data();
  b.pages = pages.data();
  b.kv_type = kv_type;
  b.block_tokens = block_tokens;
  b.logits = logits.data();
  b.greedy = greedy.data();
  b.finite = finite.data();
  b.taps = taps;
  b.num_taps = 2;
  b.tapped = tapped.data();
  job.prepare(b);
  pool.run(job);
  for (size_t row = 0; row < n; ++row) {
    all.insert(all.end(), &logits[row * vocabulary], &logits[row * vocabulary] + vocabulary);
    all.insert(all.end(), &tapped[row * tapped_size], &tapped[row * tapped_size] + tapped_size);
  }
  return all;
}

bool check(const Level& level, const std::string& wanted, RowType type, KvType kv_type, int input_bits) {
  const World world(wanted, type, input_bits, !has_scales(kv_type));
  const Model& m = world.model;
  const int block_tokens = one_of({1, 3, 5, 8, 16, 17, 24, 32, 48});
  const std::vector<int> lengths{1, draw(2, 40), kPartition + draw(0, 2), draw(kPartition, kLongest)};
  std::vector<std::vector<int64_t>> tokens;
  int64_t page = 0;
  for (int length : lengths) {
    tokens.emplace_back();
    for (int i = 0; i < length; ++i) tokens.back().push_back(draw(0, m.vocabulary - 1));
  }
  const Groups groups = random_groups(lengths, block_tokens, page);
  // Allocated with exactly the size of the pages, so that the address sanitizer detects accesses beyond them.
  const size_t planes = m.latent.rank ? 1 : 2;
  const size_t bytes =
      size_t(page) * groups.page_layers() * planes * m.kv_heads * head_bytes(kv_type, block_tokens, m.key_dim());
  std::vector<uint8_t> pages(bytes, 0xff);
  Pool pool(draw(1, 4)), lone(1);
  Step job(m, level, pool.threads()), by_itself(m, level, 1);
  std::vector<std::vector<float>> alone;
  for (int s = 0; s < int(lengths.size()); ++s)
    alone.push_back(step(by_itself, lone, {{s, 0, lengths[size_t(s)]}}, tokens, groups, pages, kv_type, block_tokens));
  std::fill(pages.begin(), pages.end(), 0xff);
  std::vector<int> done(lengths.size());
  for (bool more = true; more;) {
    more = false;
    std::vector<Piece> pieces;
    for (int s = 0; s < int(lengths.size()); ++s) {
      const int left = lengths[size_t(s)] - done[size_t(s)];
      if (!left || !draw(0, 3)) continue;
      const int rows = std::min(left, draw(1, draw(0, 1) ? 3 : 200));
      pieces.push_back({s, done[size_t(s)], rows, rows > 1 && rows <= kMaxTreeTokens && draw(0, 1)});
      done[size_t(s)] += rows;
    }
    for (size_t s = 0; s < lengths.size(); ++s) more = more || done[s] < lengths[s];
    if (pieces.empty()) continue;
    const auto logits = step(job, pool, pieces, tokens, groups, pages, kv_type, block_tokens);
    size_t at = 0;
    for (const Piece& p : pieces) {
      const size_t width = size_t(m.vocabulary + 2 * m.hidden), count = size_t(p.rows) * width;
      if (std::memcmp(&logits[at], &alone[size_t(p.sequence)][size_t(p.first) * width], count * 4) != 0) {
        std::printf("%s %s: rows %d to %d of sequence %d differ from the sequence computed alone\n", level.name,
                    wanted.c_str(), p.first, p.first + p.rows, p.sequence);
        return false;
      }
      at += count;
    }
  }
  for (float v : alone.back())
    if (!std::isfinite(v)) {
      std::printf("%s %s: a value is not finite\n", level.name, wanted.c_str());
      return false;
    }
  return true;
}

// Two ranks with equal shares compute steps together; each must find the same logits for its part of the vocabulary.
bool check_ranks(const Level& level, const std::string& wanted, RowType type, KvType kv_type, int input_bits) {
  World world(wanted, type, input_bits, false);
  Model models[2] = {world.model, world.model};
  const int V = world.model.vocabulary, rows = 40, block_tokens = 16;
  const size_t part = size_t(rows) * size_t(row_floats(world.model.hidden));
  std::vector<uint8_t> memory(Ranks::bytes(2, part) + 64), pages;
  uint8_t* shared = memory.data() + 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
  std::vector<float> logits(size_t(rows) * 2 * size_t(V));
  const int kv_heads = world.model.kv_heads;
  pages.assign(size_t(4) * 2 * 2 * 2 * kv_heads * head_bytes(kv_type, block_tokens, world.model.head_dim), 0xff);
  const int64_t table[] = {2, 0, 3, 1};
  std::vector<int64_t> tokens, positions, slots;
  for (int i = 0; i < 64; ++i) {
    tokens.push_back(draw(0, 2 * V - 1));
    positions.push_back(i);
    slots.push_back(table[i / block_tokens] * block_tokens + i % block_tokens);
  }
  std::vector<std::thread> ranks;
  std::atomic<bool> fine{true};
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([&, rank] {
      Model& m = models[rank];
      m.page_kv_heads = 2 * kv_heads, m.first_kv_head = rank * kv_heads;
      m.all_tokens = 2 * V, m.first_token = rank * V;
      Ranks group(shared, rank, 2, part, 60.0);
      Pool pool(2);
      Step job(m, level, pool.threads(), &group);
      std::vector<int64_t> greedy(rows);
      std::vector<uint8_t> finite(rows);
      std::vector<int64_t> sampled;
      for (int i = 0; i < rows; ++i) sampled.push_back(i);
      for (int first = 0; first < 64; first = first ? first + 1 : rows) {
        const Sequence sequence{0, first ? 1 : rows, first ? first + 1 : rows, table};
        Batch b;
        b.rows = b.num_sampled = sequence.queries;
        b.tokens = tokens.data() + first, b.positions = positions.data() + first, b.slots = slots.data() + first;
        b.sequences = &sequence, b.num_sequences = 1;
        b.sampled = sampled.data();
        b.pages = pages.data(), b.kv_type = kv_type, b.block_tokens = block_tokens;
        b.logits = logits.data(), b.greedy = greedy.data(), b.finite = finite.data();
        job.prepare(b);
        pool.run(job);
        for (int row = 0; !rank && row < b.rows; ++row)
          if (std::memcmp(&logits[size_t(row) * 2 * V], &logits[size_t(row) * 2 * V + V], size_t(V) * 4)) fine = false;
      }
      if (group.missing() >= 0) fine = false;
    });
  for (std::thread& rank : ranks) rank.join();
  if (!fine) std::printf("%s %s: two ranks with equal shares differ\n", level.name, wanted.c_str());
  return fine;
}

}  // namespace

// Usage: kvferry_check [seed]
int main(int count, char** arguments) {
  if (count > 1) rng.seed(unsigned(std::atoi(arguments[1])));
  struct Form {
    const char* wanted;
    RowType type;
  };
  const Form forms[] = {{"f32", RowType::f32},        {"f16", RowType::f32},      {"bf16", RowType::f32},
                        {"shipped", RowType::q4_1},   {"shipped", RowType::q8_0}, {"shipped", RowType::q6_k},
                        {"shipped", RowType::iq4_nl}, {"shipped", RowType::e2m1}, {"mixed", RowType::q6_k}};
  for (const Level* level : usable_levels())
    for (const Form& form : forms)
      for (KvType kv_type : {KvType::f32, KvType::bf16, KvType::int8, KvType::fp8})
        for (int input_bits : {8, 16, 32})
          if (!check(*level, form.wanted, form.type, kv_type, input_bits) ||
              !check_ranks(*level, form.wanted, form.type, kv_type, input_bits))
            return 1;
  std::puts("ok");
  return 0;
}
