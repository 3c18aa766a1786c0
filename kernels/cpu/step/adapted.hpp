// The phases that only batches with adapters have, and the updates that they add to a step's products.
#pragma once
#include "data/adapter.hpp"
#include "data/adapter_layout.hpp"
#include "data/rows.hpp"
#include "products/low_rank.hpp"
#include "step/level.hpp"
#include "step/step.hpp"

namespace kvferry::KVFERRY_LEVEL {

static inline Expansion expansion_of(const Step& step, int layer, LowRank AdapterLayer::* matrix) {
  return {step.batch.adapter_of_row, step.batch.adapters, layer, matrix, parts_of(step.model, matrix), step.shrunk,
          size_t(step.shrunk_stride)};
}

// Computes A x of a run of rows, for the product that follows.
static inline void shrink_run(Step& step, Phase phase, int layer, int chunk) {
  const Model& m = step.model;
  const Step::AdapterRun& run = step.adapter_runs[size_t(chunk)];
  const Adapter& adapter = *step.batch.adapters[run.adapter];
  const AdapterLayer& of = adapter.layers[layer];
  const int* rows = step.adapted_rows.data() + run.first;
  const auto go = [&](const LowRank& update, const Rows& x, bool has_floats, int n) {
    if (update.rank)
      shrink(update, adapter.is_bf16, x, has_floats, n, rows, run.count, step.shrunk, size_t(step.shrunk_stride));
  };
  // Rows of x and of attended are computed as floats, whichever representation the products read.
  switch (phase) {
    case Phase::shrink_qkv: go(of.qkv, step.x, true, m.hidden); break;
    case Phase::shrink_output: go(of.output, step.attended, true, m.heads * m.head_dim); break;
    case Phase::shrink_gate_up: go(of.gate_up, step.x, true, m.hidden); break;
    default: go(of.down, step.hidden_up, step.hidden_up.forms.f32, m.intermediate); break;
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
