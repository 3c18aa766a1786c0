// Runnable models: they validate a model, its adapters and its batches, release the GIL and call the kernels.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "data/adapter_layout.hpp"
#include "data/batch.hpp"
#include "data/batch_checks.hpp"
#include "data/matrix.hpp"
#include "data/model.hpp"
#include "runtime/pool.hpp"
#include "runtime/ranks.hpp"
#include "attention/item.hpp"
#include "step/level.hpp"
#include "step/step.hpp"
#include "bindings.hpp"
#include "single_calls.hpp"

namespace kvferry {

inline KvType kv_type_named(const std::string& name) {
  if (name == "float32") return KvType::f32;
  if (name == "bfloat16") return KvType::bf16;
  if (name == "int8") return KvType::int8;
  require(name == "fp8", "the KV type must be float32, bfloat16, int8 or fp8");
  return KvType::fp8;
}

// An adapter of one model; Python owns its memory.
struct PackedAdapter {
  Adapter adapter;
  const void* model = nullptr;
  std::vector<AdapterLayer> layers;
  std::vector<nb::object> owners;
};

// The ranks of a model in an array that several processes map; the array stays alive with the object.
struct SharedRanks {
  Bytes memory;
  Ranks ranks;

  SharedRanks(Bytes shared, int rank, int size, size_t part_floats, double seconds)
      : memory(shared), ranks(checked(shared, rank, size, part_floats), rank, size, part_floats, seconds) {}

 private:
  static uint8_t* checked(const Bytes& shared, int rank, int size, size_t part_floats) {
    require(size > 1 && size <= kMaxRanks && rank >= 0 && rank < size, "a group has 2 to 64 ranks");
    require(shared.size() >= Ranks::bytes(size, part_floats), "the ranks' memory is too small");
    require(reinterpret_cast<uintptr_t>(shared.data()) % 64 == 0, "the ranks' memory is not aligned");
    return shared.data();
  }
};

// A runnable model: its description, references that keep its memory alive, and its Step.
class Runner {
 public:
  // `ranks`: the group that computes the model, of which this runner has a share; null for a whole model.
  Runner(nb::dict shape, nb::dict parts, nb::list layers, const std::string& level, Pool& pool, SharedRanks* ranks)
      : pool_(pool), ranks_(ranks ? &ranks->ranks : nullptr) {
    const auto whole = [&](const char* name) { return nb::cast<int>(shape[name]); };
    Model& m = model_;
    m.hidden = whole("hidden");
    m.intermediate = whole("intermediate");
    m.heads = whole("heads");
    m.kv_heads = whole("kv_heads");
    m.head_dim = whole("head_dim");
    m.vocabulary = whole("vocabulary");
    m.first_kv_head = whole("first_kv_head");
    m.page_kv_heads = whole("page_kv_heads");
    m.first_token = whole("first_token");
    m.all_tokens = whole("all_tokens");
    m.max_tokens = whole("max_tokens");
    m.epsilon = nb::cast<float>(shape["epsilon"]);
    m.scale = nb::cast<float>(shape["scale"]);
    m.input_bits = whole("input_bits");
    const auto real = [&](const char* name) { return nb::cast<float>(shape[name]); };
    m.attention_soft_cap = real("attention_soft_cap");
    m.logit_soft_cap = real("logit_soft_cap");
    m.embedding_scale = real("embedding_scale");
    m.residual_scale = real("residual_scale");
    m.gate = Gate(whole("gate"));
    m.swiglu_alpha = real("swiglu_alpha");
    m.swiglu_limit = real("swiglu_limit");
    require(m.gate >= Gate::silu && m.gate <= Gate::clamped_swiglu, "unknown activation");
    require(is_width(m.input_bits), "input_bits must be 8, 16 or 32");
    require(m.head_dim % 16 == 0 && m.head_dim <= kMaxHeadDim, "head_dim must be a multiple of 16, at most 256");
    require(m.kv_heads > 0 && m.heads % m.kv_heads == 0, "heads must be a multiple of kv_heads");
    require(m.first_kv_head >= 0 && m.first_kv_head + m.kv_heads <= m.page_kv_heads && m.first_token >= 0 &&
                m.first_token + m.vocabulary <= m.all_tokens,
            "the share of the model is beyond its KV heads or its vocabulary");
    require(ranks_ || (m.kv_heads == m.page_kv_heads && m.vocabulary == m.all_tokens),
            "a share of a model needs ranks");
    if (shape.contains("rank")) {
      m.latent = {whole("rank"), whole("rotated"), whole("plain"), whole("value"), whole("query_rank")};
      const Latent& of = m.latent;
      require(of.rank > 0 && of.rank % 32 == 0 && of.rank <= kMaxRank && of.plain > 0 && of.plain % 32 == 0 &&
                  of.rotated > 0 && of.rotated % 16 == 0 && of.width() <= kMaxKeyDim && of.value > 0 &&
                  of.value % 16 == 0 && of.query_rank >= 0 && of.query_rank % 16 == 0,
              "latent attention has an unsupported size");
      require(m.kv_heads == 1 && m.head_dim == of.plain + of.rotated,
              "latent attention needs kv_heads 1 and head_dim = plain + rotated");
    }
    m.inputs = whole("inputs");
    const auto norm = [&](const char* name) { return parts[name].is_none() ? nullptr : floats(parts[name], m.hidden); };
    if (!parts["embedding"].is_none()) m.embedding = matrix(parts["embedding"], m.vocabulary, m.hidden);
    m.head = matrix(parts["head"], m.vocabulary, m.hidden);
    m.final_norm = norm("final_norm");
    m.head_norm = norm("head_norm");
    require(m.inputs == m.hidden || !m.embedding.data, "a model over tokens needs inputs = hidden");
    const Latent& latent = m.latent;
    const size_t angles = size_t(m.max_tokens) * (latent.rank ? latent.rotated : m.head_dim);
    const int width = m.heads * m.head_dim;
    const int qkv_rows = latent.rank ? (latent.query_rank ? latent.query_rank : width) + latent.width()
                                     : (m.heads + 2 * m.kv_heads) * m.head_dim;
    for (nb::handle item : layers) {
      const auto from = nb::cast<nb::dict>(item);
      Layer layer;
      const auto optional = [&](const char* name, size_t count) {
        return from[name].is_none() ? nullptr : floats(from[name], count);
      };
      layer.attention_norm = optional("attention_norm", m.hidden);
      layer.qkv = matrix(from["qkv"], qkv_rows, layers_.empty() ? m.inputs : m.hidden);
      layer.q_norm = optional("q_norm", m.head_dim);
      layer.k_norm = optional("k_norm", m.head_dim);
      layer.q_norm_whole = optional("q_norm_whole", width);
      layer.k_norm_whole = optional("k_norm_whole", size_t(m.kv_heads) * m.head_dim);
      require(!layer.q_norm_whole == !layer.k_norm_whole, "queries and keys must both have a norm, or neither");
      layer.cos = optional("cos", angles);
      layer.sin = optional("sin", angles);
      require(!layer.cos == !layer.sin, "a rotated layer needs both cosines and sines");
      layer.window = nb::cast<int>(from["window"]);
      require(layer.window >= 0, "window must not be negative");
      layer.sinks = optional("sinks", m.heads);
      layer.attention_output_norm = optional("attention_output_norm", m.hidden);
      layer.mlp_output_norm = optional("mlp_output_norm", m.hidden);
      if (latent.rank) {
        require(layer.cos != nullptr, "latent attention needs rotation");
        layer.latent_norm = floats(from["latent_norm"], latent.rank);
        layer.absorb = matrix(from["absorb"], m.heads * latent.rank, latent.plain);
        layer.value_up = matrix(from["value_up"], m.heads * latent.value, latent.rank);
        if (latent.query_rank) {
          layer.query_norm = floats(from["query_norm"], latent.query_rank);
          layer.query_up = matrix(from["query_up"], width, latent.query_rank);
        }
      }
      layer.output = matrix(from["output"], m.hidden, m.attended_width());
      layer.mlp_norm = optional("mlp_norm", m.hidden);
      if (from.contains("mixture")) {
        layer.mixture = mixture(nb::cast<nb::dict>(from["mixture"]));
        require(!layer.mlp_output_norm, "an MoE layer has no output norm");
      } else {
        layer.gate_up = matrix(from["gate_up"], gate_up_rows(m.intermediate), m.hidden);
        layer.down = matrix(from["down"], m.hidden, m.intermediate);
      }
      layers_.push_back(layer);
    }
    require(!layers_.empty(), "a model needs at least one layer");
    m.layers = layers_.data();
    m.num_layers = int(layers_.size());
    require(!ranks_ || m.embedding.data, "only models over tokens have ranks");
    step_ = std::make_unique<Step>(model_, usable(level), pool.threads(), ranks_);
  }

  // Returns the time by phase since the last call in seconds, accumulated over all threads. The first call starts the
  // timers.
  nb::dict phase_seconds() {
    nb::dict found;
    std::unique_lock<std::mutex> lock(one_step_, std::defer_lock);
    {
      nb::gil_scoped_release released;
      lock.lock();
    }
    for (int phase = 0; phase < kPhases; ++phase) {
      double total = 0;
      for (auto& of_thread : step_->seconds) {
        total += of_thread[size_t(phase)];
        of_thread[size_t(phase)] = 0;
      }
      found[kPhaseNames[phase]] = total;
    }
    step_->is_timed = true;
    return found;
  }

  // `layers`: for each layer, a dict from the name of a packed matrix to (rank of each part, bytes of A, bytes of B).
  std::unique_ptr<PackedAdapter> adapter(nb::list layers, bool is_bf16) {
    auto packed = std::make_unique<PackedAdapter>();
    packed->model = this;
    packed->adapter.is_bf16 = is_bf16;
    require(model_.latent.rank == 0, "models with latent attention do not support adapters");
    require(layers.size() == layers_.size(), "an adapter needs an entry for every layer");
    for (size_t i = 0; i < layers.size(); ++i) {
      const auto from = nb::cast<nb::dict>(layers[i]);
      AdapterLayer& layer = packed->layers.emplace_back();
      for (const AdaptedMatrix& each : kAdapted) {
        if (!from.contains(each.name)) continue;
        const auto update = nb::cast<nb::tuple>(from[each.name]);
        const auto a = exactly<Array<const uint8_t>>(update[1], "A"), b = exactly<Array<const uint8_t>>(update[2], "B");
        layer.*each.update =
            lay_out_update(model_, layers_[i].*each.matrix, each.update, nb::cast<std::vector<int>>(update[0]),
                           a.data(), a.size(), b.data(), b.size(), is_bf16);
        packed->adapter.max_rank = std::max(packed->adapter.max_rank, (layer.*each.update).rank);
        packed->owners.push_back(update);
      }
    }
    packed->adapter.layers = packed->layers.data();
    return packed;
  }

  // kvferry/kernels/compiled.py documents the arrays.
  void step(Ints tokens, Ints positions, Ints slots, Ints queries, Ints contexts, Ints tables, Ints sampled,
            uintptr_t pages, int64_t num_pages, int block_tokens, const std::string& kv_type, Array<float> logits,
            Array<int64_t> greedy, Bytes finite, Ints shown, Array<float> hidden, Ints adapter_of_row,
            nb::list adapters, Ints taps, Array<float> tapped, Floats residuals, Floats inputs, Ints places,
            int page_layers, Ints further_slots, Ints further_tables, Ints trees, Ints paths) {
    Batch b;
    b.rows = int(tokens.size());
    b.num_sequences = int(queries.size());
    b.num_sampled = int(sampled.size());
    b.num_shown = int(shown.size());
    require(b.rows > 0, "a step needs rows");
    require(b.num_sampled <= b.rows, "more rows are sampled than exist");
    require(positions.size() == tokens.size() && slots.size() == tokens.size(),
            "tokens, positions and slots differ in number");
    require(contexts.size() == queries.size() && tables.ndim() == 2 && tables.shape(0) == queries.size(),
            "the sequences' arrays differ in number");
    require(logits.size() == sampled.size() * size_t(model_.all_tokens) && greedy.size() == sampled.size() &&
                finite.size() == sampled.size(),
            "the results have the wrong size");
    require(hidden.size() == shown.size() * size_t(model_.hidden), "the hidden states have the wrong size");
    require(block_tokens > 0 && num_pages > 0 && pages != 0, "pages must not be empty");
    const size_t rows = tokens.size();
    require(tapped.size() == rows * taps.size() * size_t(model_.hidden), "the tapped layer inputs have the wrong size");
    check_indices(taps.data(), taps.size(), 0, model_.num_layers, "a tapped layer does not exist");
    if (model_.embedding.data) {
      require(!inputs.size() && !residuals.size(), "rows must be tokens, not vectors");
      check_indices(tokens.data(), rows, 0, model_.all_tokens, "a token is not in the vocabulary");
    } else {
      require(inputs.size() == rows * size_t(model_.inputs) && residuals.size() == rows * size_t(model_.hidden),
              "the rows' vectors have the wrong size");
      b.inputs = inputs.data();
      b.residuals = residuals.data();
    }
    check_indices(positions.data(), positions.size(), 0, model_.max_tokens,
                  "a position is beyond the model's context length");
    check_indices(slots.data(), slots.size(), 0, num_pages * block_tokens, "a slot is beyond the pages");
    check_indices(sampled.data(), sampled.size(), 0, b.rows, "a sampled row does not exist");
    check_indices(shown.data(), shown.size(), 0, b.rows, "a row of hidden states does not exist");
    thread_local std::vector<const Adapter*> given;
    given.clear();
    for (nb::handle each : adapters) {
      const auto& packed = nb::cast<const PackedAdapter&>(each);
      require(packed.model == this, "an adapter belongs to a different model");
      given.push_back(&packed.adapter);
    }
    require(given.empty() || adapter_of_row.size() == tokens.size(), "each row needs the index of its adapter");
    if (!given.empty())
      check_indices(adapter_of_row.data(), adapter_of_row.size(), -1, int64_t(given.size()),
                    "a row's adapter does not exist");
    require(!places.size() || places.size() == 2 * layers_.size(), "places must have an entry for each layer");
    b.places = places.size() ? places.data() : nullptr;
    b.page_layers = page_layers;
    const std::vector<int> windows = group_windows(model_, b);
    require(!trees.size() || (trees.size() == queries.size() && paths.size() == rows), "trees have the wrong size");
    thread_local std::vector<Sequence> sequences;
    describe_sequences(queries.data(), contexts.data(), tables.data(), tables.shape(1), b.rows, model_.max_tokens,
                       block_tokens, num_pages, queries.size(), windows[0], trees.size() ? trees.data() : nullptr,
                       sequences);
    b.tokens = tokens.data();
    b.positions = positions.data();
    b.slots = slots.data();
    b.sequences = sequences.data();
    if (trees.size()) {
      b.paths = reinterpret_cast<const uint64_t*>(paths.data());
      check_paths(b);
    }
    const size_t further = windows.size() - 1;
    require(further_slots.size() == further * rows && further_tables.size() == further * tables.size(),
            "slots or tables of further layer groups have the wrong size");
    b.further_slots = further_slots.data();
    b.further_tables = further_tables.data();
    b.table_width = tables.shape(1);
    check_further(b, windows, block_tokens, num_pages);
    b.sampled = sampled.data();
    b.pages = reinterpret_cast<uint8_t*>(pages);
    b.kv_type = kv_type_named(kv_type);
    require(!model_.latent.rank || !has_scales(b.kv_type), "latent vectors do not support KV in 8 bits");
    b.block_tokens = block_tokens;
    b.logits = logits.data();
    b.greedy = greedy.data();
    b.finite = finite.data();
    b.shown = shown.data();
    b.hidden = hidden.data();
    b.adapter_of_row = adapter_of_row.data();
    b.adapters = given.data();
    b.num_adapters = int(given.size());
    b.taps = taps.data();
    b.num_taps = int(taps.size());
    b.tapped = tapped.data();
    nb::gil_scoped_release released;  // before the lock, since its holder needs the GIL to return
    std::lock_guard<std::mutex> lock(one_step_);
    if (!ranks_) {
      step_->prepare(b);
      return pool_.run(*step_);
    }
    require(size_t(b.rows) * size_t(row_floats(model_.hidden)) <= ranks_->part_floats(),
            "the ranks' memory is too small for the step");
    step_->prepare(b);
    pool_.run(*step_);
    if (ranks_->missing() >= 0)
      throw std::runtime_error("rank " + std::to_string(ranks_->missing()) +
                               " of the model has ended, or did not compute its part within " +
                               std::to_string(int(ranks_->seconds())) + " s");
  }

 private:
  static int gate_up_rows(int intermediate) { return 2 * ((intermediate + kPanel - 1) / kPanel * kPanel); }
  // `from`: the fields of Mixture by name, "experts" and "shared": pairs of gate_up and down, or None.
  Mixture mixture(nb::dict from) {
    Mixture found;
    auto experts = nb::cast<std::vector<nb::object>>(from["experts"]);
    found.count = int(experts.size());
    found.active = nb::cast<int>(from["active"]);
    found.renormalizes = nb::cast<bool>(from["renormalizes"]);
    found.is_sigmoid = nb::cast<bool>(from["is_sigmoid"]);
    found.groups = nb::cast<int>(from["groups"]);
    found.active_groups = nb::cast<int>(from["active_groups"]);
    found.weight_scale = nb::cast<float>(from["weight_scale"]);
    found.has_shared_gate = nb::cast<bool>(from["has_shared_gate"]);
    found.has_shared = !from["shared"].is_none();
    require(found.groups > 0 && found.count % found.groups == 0 && found.active_groups > 0 &&
                found.active_groups <= found.groups && found.active <= found.count / found.groups * found.active_groups,
            "the number of experts must be a multiple of groups, and active groups must hold the active experts");
    if (!from["correction"].is_none()) found.correction = floats(from["correction"], size_t(found.count));
    require(found.active > 0 && found.active <= found.count, "active must be between 1 and the number of experts");
    if (found.has_shared) experts.push_back(nb::borrow(from["shared"]));
    found.router = matrix(from["router"], found.count + (found.has_shared_gate ? 1 : 0), model_.hidden);
    std::vector<Expert>& list = experts_.emplace_back();
    for (nb::handle each : experts) {
      const auto pair = nb::cast<nb::tuple>(each);
      const int inner = nb::cast<PackedMatrix&>(pair[1]).matrix.cols;
      list.push_back({matrix(pair[0], gate_up_rows(inner), model_.hidden), matrix(pair[1], model_.hidden, inner)});
    }
    found.experts = list.data();
    return found;
  }
  Matrix matrix(nb::handle from, int rows, int cols) {
    const auto& packed = nb::cast<PackedMatrix&>(from);
    require(packed.matrix.rows == rows && packed.matrix.cols == cols && packed.matrix.data,
            "a matrix has the wrong shape, or no data");
    owners_.push_back(nb::borrow(from));
    return packed.matrix;
  }
  const float* floats(nb::handle from, size_t count) {
    const auto values = exactly<Floats>(from, "a vector of weights");
    require(values.size() == count, "an array has the wrong size");
    owners_.push_back(nb::borrow(from));
    return values.data();
  }

  Pool& pool_;
  Ranks* ranks_;
  Model model_;
  std::vector<Layer> layers_;
  std::vector<std::vector<Expert>> experts_;  // experts of each MoE layer
  std::mutex one_step_;                       // engines in one process may share a model
  std::vector<nb::object> owners_;
  std::unique_ptr<Step> step_;
};

}  // namespace kvferry
