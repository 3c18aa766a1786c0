// Computes one chunk of each phase of an MoE layer.
#pragma once
#include <cstddef>
#include <cstring>

#include "data/model.hpp"
#include "data/rows.hpp"
#include "simd/simd.hpp"
#include "products/products.hpp"
#include "step/experts.hpp"
#include "step/gated.hpp"
#include "step/step.hpp"

namespace kvferry::KVFERRY_LEVEL {

// Copies a row of inputs in all stored representations.
static inline void copy_row(const Rows& from, int source, const Rows& to, int target) {
  const Rows a = from.from(source), b = to.from(target);
  const size_t n = size_t(from.stride), halves = n / kSumWidth, groups = n / kGroup;
  if (a.forms.f32) std::memcpy(b.f32, a.f32, n * 4);
  if (a.forms.bf16) std::memcpy(b.bf16, a.bf16, n * 2);
  std::memcpy(b.half_sums, a.half_sums, halves * 4);
  std::memcpy(b.group_sums, a.group_sums, groups * 4);
  if (a.forms.are_quantized()) std::memcpy(b.scales, a.scales, groups * 4);
  if (a.forms.words) std::memcpy(b.words, a.words, n * 2);
  if (a.forms.low_words) std::memcpy(b.low_words, a.low_words, n * 2);
  if (a.forms.bytes) {
    std::memcpy(b.bytes, a.bytes, n);
    std::memcpy(b.byte_sums, a.byte_sums, halves * 4);
  }
}

// Copies the inputs of entries that are not adjacent rows of x.
static inline void gather_entries(Step& step, int first, int end) {
  for (const ExpertRun& run : step.experts.runs) {
    if (run.source >= 0) continue;
    const int from = run.first < first ? first : run.first;
    const int last = run.first + run.count < end ? run.first + run.count : end;
    for (int entry = from; entry < last; ++entry)
      copy_row(step.x, step.experts.row_of[size_t(entry)], step.expert_x, entry);
  }
}

// Adds the outputs of a row's experts, in the order of experts, to the residual, or stores them as this rank's part.
static inline void combine_rows(Step& step, int first, int end) {
  const size_t stride = size_t(step.x.stride);
  const ExpertPlan& plan = step.experts;
  for (int row = first; row < end; ++row) {
    float* residual = step.residual + size_t(row) * stride;
    float* part = step.ranks ? step.ranks->own_part() + size_t(row) * stride : nullptr;
    const int* entries = plan.entries_of.data() + size_t(row) * size_t(plan.per_row);
    for (size_t i = 0; i < stride; i += kPanel) {
      V sum = v_zero();
      for (int k = 0; k < plan.per_row; ++k)
        sum = v_fma(v_set(plan.share_of[size_t(entries[k])]), v_load(step.expert_out + size_t(entries[k]) * stride + i),
                    sum);
      if (part)
        v_store(part + i, sum);
      else
        v_store(residual + i, v_fma(sum, v_set(step.model.residual_scale), v_load(residual + i)));
    }
  }
}

static inline void run_mixture_chunk(Step& step, Phase phase, const Mixture& mixture, int chunk, int thread) {
  const int first = chunk * step.row_chunk;
  const auto until = [&](int rows) { return rows < first + step.row_chunk ? rows : first + step.row_chunk; };
  if (phase == Phase::route) {
    const int width = mixture.router.panels * kPanel;
    store_product(mixture.router, step.x, step.batch.rows, step.router_blocking, nullptr, chunk, step.scratch(thread),
                  step.router_logits, size_t(width));
  } else if (phase == Phase::gather) {
    gather_entries(step, first, until(step.batch.rows * step.experts.per_row));
  } else if (phase == Phase::expert_gate_up) {
    const ExpertRun& run = step.experts.locate(&ExpertRun::gate_up_end, chunk);
    const Rows x = run.source >= 0 ? step.x.from(run.source) : step.expert_x.from(run.first);
    gated_product(mixture.experts[run.expert].gate_up, x, run.count, run.gate_up, nullptr, chunk, step.scratch(thread),
                  step.expert_up.from(run.first), step.model);
  } else if (phase == Phase::expert_down) {
    const ExpertRun& run = step.experts.locate(&ExpertRun::down_end, chunk);
    const size_t stride = size_t(step.x.stride);
    store_product(mixture.experts[run.expert].down, step.expert_up.from(run.first), run.count, run.down, nullptr, chunk,
                  step.scratch(thread), step.expert_out + size_t(run.first) * stride, stride);
  } else {
    combine_rows(step, first, until(step.batch.rows));
  }
}

}  // namespace kvferry::KVFERRY_LEVEL
