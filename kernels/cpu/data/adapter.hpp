// An adapter: low-rank updates to a model's linear layers, y += B (A x) (Hu et al., LoRA, 2021).
#pragma once
#include <cstdint>

namespace kvferry {

constexpr int kMaxParts = 3;
constexpr int kRankStep = 4;  // ranks are padded with zeros to a multiple of this

// Weights are stored as two vectors of 16 at a time: inputs 0 .. 15 and 16 .. 31 of a row of A, or two ranks of a panel
// of B. In bfloat16, lane i of the first vector and lane i of the second are stored side by side.

// Update to the outputs of one of the matrices fused in a packed matrix.
struct LowRankPart {
  int rank = 0;                // 0 if these outputs are not updated
  int first = 0;               // index of this part's first value in A x
  const uint8_t* b = nullptr;  // [panels][rank][16], multiplied by the adapter's scale
};

// Update to a packed matrix. A stacks the A of all parts.
struct LowRank {
  int rank = 0;                // rows of A; 0 without an update
  int width = 0;               // inputs, rounded up to 32 with zeros
  const uint8_t* a = nullptr;  // [rank][width]
  LowRankPart parts[kMaxParts];
};

struct AdapterLayer {
  LowRank qkv, output, gate_up, down;
};

struct Adapter {
  bool is_bf16 = false;  // values are bfloat16 instead of float32
  int max_rank = 0;      // largest rank of any LowRank
  const AdapterLayer* layers = nullptr;
};

// How the panels of a packed matrix are assigned to parts: in order, or alternating between two parts.
struct PanelParts {
  bool alternates = false;
  int ends[kMaxParts] = {};  // end of each part's panels; unused if they alternate

  void locate(int panel, int& part, int& local) const {
    if (alternates) {
      part = panel % 2;
      local = panel / 2;
      return;
    }
    part = panel < ends[0] ? 0 : panel < ends[1] ? 1 : 2;
    local = part ? panel - ends[part - 1] : panel;
  }
};

}  // namespace kvferry
