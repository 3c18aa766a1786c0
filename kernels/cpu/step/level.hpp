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
// are for MoE layers; the phases after `combine` are for latent attention.
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
  attended_rows
};
constexpr int kPhases = 28;
constexpr const char* kPhaseNames[kPhases] = {
    "embed",   "qkv",         "rotate",    "attend",        "merge",         "output",         "mlp_norm",
    "gate_up", "down",        "next_norm", "shrink_qkv",    "shrink_output", "shrink_gate_up", "shrink_down",
    "head",    "pick",        "route",     "plan_experts",  "gather",        "expert_gate_up", "expert_down",
    "combine", "latent_rows", "query_up",  "split_queries", "absorb",        "value_up",       "attended_rows"};

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
