// Sanitizer program (`make sanitize`): runs random batches through small random models of every weight format, with
// several threads, on every level. The exit status is 1 if a row's logits differ from the logits that a single thread
// computes for this sequence alone. Buffers are poisoned before every step.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "data/batch.hpp"
#include "data/matrix.hpp"
#include "data/model.hpp"
#include "runtime/pool.hpp"
#include "weights/pack.hpp"
#include "attention/item.hpp"
#include "step/level.hpp"
#include "step/step.hpp"
#include "levels/levels.hpp"

using namespace kvferry;

namespace {

std::mt19937 rng(11);

constexpr int kLongest = 700;  // maximum number of tokens of a sequence

int draw(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }
int one_of(const std::vector<int>& choices) { return choices[size_t(draw(0, int(choices.size()) - 1))]; }
std::vector<float> floats(size_t n, float scale) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(n);
  for (auto& v : values) v = normal(rng);
  return values;
}

struct Packed {
  Matrix matrix;
  std::vector<uint8_t> data;
};

Packed random_matrix(const std::string& wanted, RowType type, int rows, int cols) {
  Packed p;
  p.matrix = packed_layout(wanted, {type}, rows, cols);
  p.data.resize(p.matrix.panel_bytes * size_t(p.matrix.panels));
  std::vector<uint8_t> raw(row_bytes(type, cols) * size_t(rows));
  if (type == RowType::f32) {
    const auto values = floats(size_t(rows) * cols, 0.1f);
    std::memcpy(raw.data(), values.data(), raw.size());
  } else {  // random quantized values with scales of about 0.01
    for (auto& byte : raw) byte = uint8_t(draw(0, 255));
    const size_t block = row_bytes(type, type == RowType::q6_k ? 256 : 32);
    for (size_t at = type == RowType::q6_k ? 208 : 0; at < raw.size(); at += block) {
      raw[at] = uint8_t(draw(0, 255));
      raw[at + 1] = type == RowType::q6_k ? 0x0c : 0x20;
      if (type == RowType::q4_1) raw[at + 3] = 0x9c;
    }
  }
  std::vector<int64_t> order(static_cast<size_t>(rows));
  for (int r = 0; r < rows; ++r) order[size_t(r)] = r;
  pack(p.matrix, {{type, raw.data(), rows}}, order.data(), p.data.data());
  p.matrix.data = p.data.data();
  return p;
}

// A random model, and the memory that it points to.
struct World {
  Model model;
  std::vector<Packed> matrices;
  std::vector<std::vector<float>> vectors;
  std::vector<Layer> layers;
  std::vector<Expert> experts;

  World(const std::string& wanted, RowType type, int input_bits, bool may_be_latent) {
    model.input_bits = input_bits;
    model.kv_heads = draw(1, 3);
    model.heads = model.kv_heads * one_of({1, 2, 3, 4, 5, 7, 8, 16, 20, 70});
    model.head_dim = model.heads > 16 ? one_of({16, 48}) : one_of({16, 32, 48, 64, 80, 112, 128, 256});
    Latent& latent = model.latent;
    if (may_be_latent && !draw(0, 2)) {
      latent = {32 * draw(1, 16), 16 * draw(1, 4), 32 * draw(1, 4), 16 * draw(1, 6), draw(0, 1) * 16 * draw(1, 4)};
      model.kv_heads = 1;
      model.heads = one_of({1, 2, 5, 16, 40});
      model.head_dim = latent.plain + latent.rotated;
    }
    model.hidden = one_of({64, 72, 80, 96, 128, 256});
    model.intermediate = draw(0, 1) ? draw(1, 300) : 32 * draw(1, 16);
    model.vocabulary = model.all_tokens = draw(20, 200);
    model.page_kv_heads = model.kv_heads;
    model.max_tokens = kLongest + 20;
    model.epsilon = 1e-5f;
    model.scale = 1.0f / std::sqrt(float(model.head_dim));
    const bool has_experts = draw(0, 1);
    matrices.reserve(128);
    experts.reserve(32);
    vectors.reserve(64);
    const auto norm = [&](int n) { return vectors.emplace_back(floats(size_t(n), 1.0f)).data(); };
    const auto matrix = [&](int rows, int cols) {
      RowType t = type;
      if (wanted == "mixed")
        t = RowType(one_of({int(RowType::f32), int(RowType::q4_1), int(RowType::q8_0), int(type)}));
      if (row_bytes(t, cols) == 0) t = RowType::f32;  // the inputs are not a multiple of the block
      std::string form = wanted;
      if (t != RowType::f32) {
        form = "shipped";
      } else if (wanted == "mixed" || type != RowType::f32) {
        form = std::array<const char*, 3>{"f32", "f16", "bf16"}[size_t(draw(0, 2))];
      }
      return matrices.emplace_back(random_matrix(form, t, rows, cols)).matrix;
    };
    const int width = model.heads * model.head_dim;
    for (int i = 0; i < 2; ++i) {
      Layer layer;
      layer.attention_norm = norm(model.hidden);
      if (latent.rank) {
        layer.qkv = matrix((latent.query_rank ? latent.query_rank : width) + latent.width(), model.hidden);
        layer.query_norm = norm(latent.query_rank);
        layer.latent_norm = norm(latent.rank);
        if (latent.query_rank) layer.query_up = matrix(width, latent.query_rank);
        layer.absorb = matrix(model.heads * latent.rank, latent.plain);
        layer.value_up = matrix(model.heads * latent.value, latent.rank);
      } else {
        layer.qkv = matrix((model.heads + 2 * model.kv_heads) * model.head_dim, model.hidden);
        layer.q_norm = i ? norm(model.head_dim) : nullptr;
        layer.k_norm = i ? norm(model.head_dim) : nullptr;
      }
      layer.output = matrix(model.hidden, model.attended_width());
      layer.mlp_norm = norm(model.hidden);
      const auto gate_up_rows = [](int inner) { return 2 * ((inner + kPanel - 1) / kPanel * kPanel); };
      if (i && has_experts) {
        layer.mixture.count = draw(1, 20);
        layer.mixture.active = draw(1, std::min(layer.mixture.count, 6));
        layer.mixture.renormalizes = draw(0, 1);
        layer.mixture.has_shared = draw(0, 1);
        layer.mixture.has_shared_gate = layer.mixture.has_shared && draw(0, 1);
        layer.mixture.weight_scale = draw(0, 1) ? 1.0f : 1.7f;
        if (layer.mixture.count % 2 == 0 && layer.mixture.active * 2 <= layer.mixture.count && draw(0, 1))
          layer.mixture.groups = 2;
        layer.mixture.is_sigmoid = draw(0, 1);
        if (layer.mixture.is_sigmoid) layer.mixture.correction = norm(layer.mixture.count);
        const int all = layer.mixture.count + (layer.mixture.has_shared ? 1 : 0), inner = 32 * draw(1, 4);
        layer.mixture.router = matrix(layer.mixture.count + layer.mixture.has_shared_gate, model.hidden);
        for (int e = 0; e < all; ++e) {
          const int size = e < layer.mixture.count ? inner : draw(1, 90);
          experts.push_back({matrix(gate_up_rows(size), model.hidden), matrix(model.hidden, size)});
        }
        layer.mixture.experts = experts.data();
      } else {
        layer.gate_up = matrix(gate_up_rows(model.intermediate), model.hidden);
        layer.down = matrix(model.hidden, model.intermediate);
      }
      layers.push_back(layer);
    }
    model.layers = layers.data();
    model.num_layers = 2;
    model.embedding = model.head = matrix(model.vocabulary, model.hidden);
    model.final_norm = model.head_norm = norm(model.hidden);
    const float* cos = vectors.emplace_back(floats(size_t(model.max_tokens) * model.head_dim, 0.7f)).data();
    const float* sin = vectors.emplace_back(floats(size_t(model.max_tokens) * model.head_dim, 0.7f)).data();
    model.attention_soft_cap = draw(0, 2) ? 0.0f : 2.0f;
    model.logit_soft_cap = draw(0, 2) ? 0.0f : 3.0f;
    model.residual_scale = draw(0, 2) ? 1.0f : 0.5f;
    model.embedding_scale = draw(0, 2) ? 1.0f : 3.0f;
    model.gate = Gate(std::max(0, draw(-2, 2)));
    model.swiglu_alpha = 1.7f;
    model.swiglu_limit = 0.5f;
    const int placement = draw(0, 3);  // norms on the inputs, on the outputs, or on both
    for (Layer& layer : layers) {
      if (draw(0, 2) || latent.rank) layer.cos = cos, layer.sin = sin;
      if (!draw(0, 2)) layer.sinks = vectors.emplace_back(floats(size_t(model.heads), 2.0f)).data();
      layer.window = draw(0, 2) ? 0 : one_of({1, 7, 16, 100, 256, 300});
      if (placement > 1) layer.attention_output_norm = layer.mlp_output_norm = norm(model.hidden);
      if (layer.mixture.count) layer.mlp_output_norm = nullptr;
      if (placement == 2) layer.attention_norm = layer.mlp_norm = nullptr;
      if (!draw(0, 3) && !latent.rank) {
        layer.q_norm_whole = norm(width);
        layer.k_norm_whole = norm(model.kv_heads * model.head_dim);
      }
    }
  }
};

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

}  // namespace

// kvferry_check [seed]
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
          if (!check(*level, form.wanted, form.type, kv_type, input_bits)) return 1;
  std::puts("ok");
  return 0;
}
