// Function table of an instruction set; levels/ defines one table per level.
#pragma once
#include <cstddef>
#include <cstdint>

#include "data/matrix.hpp"
#include "data/model.hpp"
#include "data/rows.hpp"
#include "runtime/pool.hpp"

namespace kvferry {

// The shrink phases compute A x of LoRA adapters, in batches with adapters. The phases after `pick`, up to `combine`,
// are for MoE layers; the phases after `combine`, up to `attended_rows`, are for latent attention; the last two are for
// models that several ranks compute: `meet` waits for the other ranks, `embedded` sums their parts of the embedding.
enum class Phase : int {
  embed,
  qkv,
  rotate,
  attend,
  merge,
  output,
  mlp_norm,
  gate_up,
  down,
  next_norm,
  shrink_qkv,
  shrink_output,
  shrink_gate_up,
  shrink_down,
  head,
  pick,
  route,
  plan_experts,
  gather,
  expert_gate_up,
  expert_down,
  combine,
  latent_rows,
  query_up,
  split_queries,
  absorb,
  value_up,
  attended_rows,
  meet,
  embedded
};
constexpr int kPhases = 30;
constexpr const char* kPhaseNames[kPhases] = {
    "embed",   "qkv",         "rotate",    "attend",        "merge",         "output",         "mlp_norm",
    "gate_up", "down",        "next_norm", "shrink_qkv",    "shrink_output", "shrink_gate_up", "shrink_down",
    "head",    "pick",        "route",     "plan_experts",  "gather",        "expert_gate_up", "expert_down",
    "combine", "latent_rows", "query_up",  "split_queries", "absorb",        "value_up",       "attended_rows",
    "meet",    "embedded"};

// The phases of a layer, in order; a phase that a layer does not have has no chunks.
constexpr Phase kLayerPhases[] = {Phase::qkv,    Phase::rotate, Phase::attend,   Phase::merge,
                                  Phase::output, Phase::meet,   Phase::mlp_norm, Phase::gate_up,
                                  Phase::down,   Phase::meet,   Phase::next_norm};
constexpr Phase kAdaptedLayerPhases[] = {
    Phase::shrink_qkv,    Phase::qkv,         Phase::rotate, Phase::attend,   Phase::merge,
    Phase::shrink_output, Phase::output,      Phase::meet,   Phase::mlp_norm, Phase::shrink_gate_up,
    Phase::gate_up,       Phase::shrink_down, Phase::down,   Phase::meet,     Phase::next_norm};
// For MoE models, which may have layers with a plain MLP.
constexpr Phase kMixtureLayerPhases[] = {
    Phase::qkv,          Phase::rotate,   Phase::attend,         Phase::merge,       Phase::output,
    Phase::meet,         Phase::mlp_norm, Phase::gate_up,        Phase::down,        Phase::route,
    Phase::plan_experts, Phase::gather,   Phase::expert_gate_up, Phase::expert_down, Phase::combine,
    Phase::meet,         Phase::next_norm};
constexpr Phase kAdaptedMixtureLayerPhases[] = {Phase::shrink_qkv,     Phase::qkv,
                                                Phase::rotate,         Phase::attend,
                                                Phase::merge,          Phase::shrink_output,
                                                Phase::output,         Phase::meet,
                                                Phase::mlp_norm,       Phase::shrink_gate_up,
                                                Phase::gate_up,        Phase::shrink_down,
                                                Phase::down,           Phase::route,
                                                Phase::plan_experts,   Phase::gather,
                                                Phase::expert_gate_up, Phase::expert_down,
                                                Phase::combine,        Phase::meet,
                                                Phase::next_norm};
// For models with latent attention, whose layers may be MoE layers.
constexpr Phase kLatentLayerPhases[] = {
    Phase::qkv,          Phase::latent_rows, Phase::query_up,       Phase::split_queries, Phase::absorb,
    Phase::attend,       Phase::merge,       Phase::value_up,       Phase::attended_rows, Phase::output,
    Phase::meet,         Phase::mlp_norm,    Phase::gate_up,        Phase::down,          Phase::route,
    Phase::plan_experts, Phase::gather,      Phase::expert_gate_up, Phase::expert_down,   Phase::combine,
    Phase::meet,         Phase::next_norm};

// Phases of a layer, for a batch and a model.
struct LayerPhases {
  const Phase* phases;
  int count;
};

template <size_t N>
inline LayerPhases all_of(const Phase (&phases)[N]) {
  return {phases, int(N)};
}

inline LayerPhases layer_phases(bool has_adapters, bool has_experts, bool is_latent) {
  if (is_latent) return all_of(kLatentLayerPhases);
  if (has_experts) return has_adapters ? all_of(kAdaptedMixtureLayerPhases) : all_of(kMixtureLayerPhases);
  return has_adapters ? all_of(kAdaptedLayerPhases) : all_of(kLayerPhases);
}

constexpr Phase kFirstPhases[] = {Phase::embed, Phase::meet, Phase::embedded};
constexpr Phase kLastPhases[] = {Phase::head, Phase::meet, Phase::pick};
constexpr int kNumFirst = 3, kNumLast = 3;

inline Phase phase_at(int index, LayerPhases each, int num_layers, int& layer) {
  layer = 0;
  if (index < kNumFirst) return kFirstPhases[index];
  const int inner = index - kNumFirst, last = inner - each.count * num_layers;
  if (last >= 0) return kLastPhases[last];
  layer = inner / each.count;
  return each.phases[inner % each.count];
}

class Step;

// Function table of a level.
struct Level {
  const char* name;
  int tile_rows;                                // maximum rows of a product's tile
  bool has_matrix_unit;                         // AMX: only private caches supply inputs and weights fast enough
  size_t (*scratch_bytes)(const Model& model);  // per thread
  InputForms (*input_forms)(const Matrix& matrix, int input_bits);
  void (*run)(Step& step, Phase phase, int layer, int chunk, int thread);
  // out [rows, matrix rows] = x [rows, cols] times the matrix; see Model for `input_bits`.
  void (*product)(Pool& pool, const Matrix& matrix, const float* x, int rows, float* out, int input_bits);
  // Dequantizes rows of a matrix into out [count, matrix cols].
  void (*dequantize)(const Matrix& matrix, const int64_t* rows, int count, float* out);
  // Roofline bounds: `read` streams a memory range; `sum_products` runs multiply-adds in registers (int8, or the
  // level's fastest type) and returns the number of operations.
  void (*read)(Pool& pool, const uint8_t* data, size_t bytes);
  double (*sum_products)(Pool& pool, int chunks, bool bytes);
};

}  // namespace kvferry
