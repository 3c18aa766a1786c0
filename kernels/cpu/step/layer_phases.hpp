// The phases of a step's layers, in order; a phase that a layer does not have has no chunks.
#pragma once
#include <cstddef>

#include "data/batch.hpp"
#include "step/level.hpp"

namespace kvferry {

constexpr Phase kLayerPhases[] = {Phase::qkv,      Phase::rotate,  Phase::attend, Phase::merge,    Phase::output,
                                  Phase::mlp_norm, Phase::gate_up, Phase::down,   Phase::next_norm};
constexpr Phase kAdaptedLayerPhases[] = {
    Phase::shrink_qkv,    Phase::qkv,    Phase::rotate,   Phase::attend,         Phase::merge,
    Phase::shrink_output, Phase::output, Phase::mlp_norm, Phase::shrink_gate_up, Phase::gate_up,
    Phase::shrink_down,   Phase::down,   Phase::next_norm};
// For MoE models, which may have layers with a plain MLP.
constexpr Phase kMixtureLayerPhases[] = {
    Phase::qkv,      Phase::rotate,         Phase::attend,      Phase::merge,   Phase::output,
    Phase::mlp_norm, Phase::gate_up,        Phase::down,        Phase::route,   Phase::plan_experts,
    Phase::gather,   Phase::expert_gate_up, Phase::expert_down, Phase::combine, Phase::next_norm};
constexpr Phase kAdaptedMixtureLayerPhases[] = {
    Phase::shrink_qkv,     Phase::qkv,         Phase::rotate,   Phase::attend,         Phase::merge,
    Phase::shrink_output,  Phase::output,      Phase::mlp_norm, Phase::shrink_gate_up, Phase::gate_up,
    Phase::shrink_down,    Phase::down,        Phase::route,    Phase::plan_experts,   Phase::gather,
    Phase::expert_gate_up, Phase::expert_down, Phase::combine,  Phase::next_norm};
// For models with latent attention, whose layers may be MoE layers.
constexpr Phase kLatentLayerPhases[] = {
    Phase::qkv,      Phase::latent_rows,    Phase::query_up,    Phase::split_queries, Phase::absorb,
    Phase::attend,   Phase::merge,          Phase::value_up,    Phase::attended_rows, Phase::output,
    Phase::mlp_norm, Phase::gate_up,        Phase::down,        Phase::route,         Phase::plan_experts,
    Phase::gather,   Phase::expert_gate_up, Phase::expert_down, Phase::combine,       Phase::next_norm};

// Phases of a layer, for a batch and a model.
struct LayerPhases {
  const Phase* phases;
  int count;
};

template <size_t N>
inline LayerPhases all_of(const Phase (&phases)[N]) {
  return {phases, int(N)};
}

inline LayerPhases layer_phases(const Batch& batch, bool has_experts, bool is_latent) {
  if (is_latent) return all_of(kLatentLayerPhases);
  if (has_experts) return batch.num_adapters ? all_of(kAdaptedMixtureLayerPhases) : all_of(kMixtureLayerPhases);
  return batch.num_adapters ? all_of(kAdaptedLayerPhases) : all_of(kLayerPhases);
}

inline Phase phase_at(int index, LayerPhases each, int num_layers, int& layer) {
  layer = 0;
  if (index == 0) return Phase::embed;
  const int inner = index - 1;
  if (inner >= each.count * num_layers) return inner == each.count * num_layers ? Phase::head : Phase::pick;
  layer = inner / each.count;
  return each.phases[inner % each.count];
}

}  // namespace kvferry
