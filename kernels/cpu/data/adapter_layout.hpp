// Checks an adapter's arrays against a model, and describes them as updates to the model's packed matrices.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "data/adapter.hpp"
#include "data/batch_checks.hpp"
#include "data/matrix.hpp"
#include "data/model.hpp"

namespace kvferry {

// The packed matrices of a layer that adapters update.
struct AdaptedMatrix {
  const char* name;
  Matrix Layer::* matrix;
  LowRank AdapterLayer::* update;
};
constexpr AdaptedMatrix kAdapted[] = {{"qkv", &Layer::qkv, &AdapterLayer::qkv},
                                      {"output", &Layer::output, &AdapterLayer::output},
                                      {"gate_up", &Layer::gate_up, &AdapterLayer::gate_up},
                                      {"down", &Layer::down, &AdapterLayer::down}};

// The parts that a packed matrix's panels belong to.
inline PanelParts parts_of(const Model& m, LowRank AdapterLayer::* which) {
  PanelParts parts;
  const int all = 1 << 30;
  if (which == &AdapterLayer::gate_up) {
    parts.alternates = true;
  } else if (which == &AdapterLayer::qkv) {
    const int q = m.heads * m.head_dim / kPanel, kv = m.kv_heads * m.head_dim / kPanel;
    parts.ends[0] = q, parts.ends[1] = q + kv, parts.ends[2] = all;
  } else {
    parts.ends[0] = parts.ends[1] = parts.ends[2] = all;
  }
  return parts;
}

// `ranks`: rank of each part. `a`: [sum of ranks][inputs rounded up to 32]; `b`: [panels][rank][16] of every part.
inline LowRank lay_out_update(const Model& m, const Matrix& matrix, LowRank AdapterLayer::* which,
                              const std::vector<int>& ranks, const uint8_t* a, size_t a_bytes, const uint8_t* b,
                              size_t b_bytes, bool is_bf16) {
  const size_t item = is_bf16 ? 2 : 4;
  const PanelParts parts = parts_of(m, which);
  int panels[kMaxParts] = {};
  for (int p = 0, part, local; p < matrix.panels; ++p) {
    parts.locate(p, part, local);
    ++panels[part];
  }
  check(!ranks.empty() && ranks.size() <= kMaxParts, "an update has the wrong number of parts");
  LowRank update;
  update.width = matrix.depth;
  update.a = a;
  size_t used = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    check(ranks[i] >= 0 && ranks[i] <= 1 << 16 && ranks[i] % kRankStep == 0 && (panels[i] || !ranks[i]),
          "an update has an invalid rank");
    update.parts[i] = {ranks[i], update.rank, b + used};
    update.rank += ranks[i];
    used += size_t(ranks[i]) * size_t(panels[i]) * kPanel * item;
  }
  check(a_bytes == size_t(update.rank) * size_t(update.width) * item, "A of an update has the wrong size");
  check(b_bytes == used, "B of an update has the wrong size");
  return update;
}

}  // namespace kvferry
