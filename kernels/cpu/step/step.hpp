// A forward pass as a job for the pool: its phases, the blocking of each phase into chunks, and the buffers between
// phases. phases.hpp implements the chunks, once per level.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

#include "data/batch.hpp"
#include "data/model.hpp"
#include "data/rows.hpp"
#include "runtime/buffer.hpp"
#include "runtime/pool.hpp"
#include "runtime/ranks.hpp"
#include "products/blocking.hpp"
#include "attention/item.hpp"
#include "step/experts.hpp"
#include "step/level.hpp"

namespace kvferry {

// Floats from one row to the next, in rows of `width` floats.
int row_floats(int width);

// `least`: minimum panels per chunk, 2 or 4.
Blocking choose_blocking(const Level& level, const Matrix& matrix, int rows, int threads, int least = 2);

class Step final : public Job {
 public:
  // `ranks`: the ranks that compute the model together, each with its share of the weights; null for one process.
  Step(const Model& model, const Level& level, int threads, Ranks* ranks = nullptr);

  // Plans a batch; pool.run(step) computes it.
  void prepare(const Batch& batch);

  int phases() const override;
  int chunks(int phase) const override;
  void run(int phase, int chunk, int thread) override;

  const Model& model;
  const Level& level;
  Ranks* const ranks;
  Batch batch;
  Rows x, attended, hidden_up;  // inputs of qkv, gate_up and head; inputs of output; inputs of down
  float* residual = nullptr;    // [rows][stride of x]
  float* projected = nullptr;   // [rows][stride of x]: outputs that are normalized before they are added, or summed
  float* qkv = nullptr;         // [rows][panels * 16]
  float* partials = nullptr;    // for split sequences: [head_dim values, max score, sum] per row, partition and head
  Blocking qkv_blocking, output_blocking, gate_up_blocking, down_blocking, head_blocking;
  int row_chunk = 0;  // rows per chunk in row-wise phases
  // MoE layers: the router's outputs, inputs gathered for an expert, inputs of down, and outputs. All but the first
  // have one row per entry of the plan.
  ExpertPlan experts;
  float* router_logits = nullptr;  // [rows][panels * 16 of the router]
  Rows expert_x, expert_up;
  float* expert_out = nullptr;  // [entries][stride of x]
  Blocking router_blocking;
  // Latent attention: inputs of query_up, queries [rows][heads * head_dim], inputs of absorb [rows][heads * plain],
  // queries for latent vectors [rows][heads * width], and attended vectors [rows][heads * rank].
  Rows query_x, absorb_x, attended_latent;
  float *queries = nullptr, *absorbed = nullptr;
  Blocking query_blocking;
  int head_rows = 0, head_row_blocks = 0;  // rows per chunk of a per-head product, and number of such chunks of a head
  // Rows with adapters, sorted by adapter, and the runs of rows with the same adapter that are shrunk together.
  struct AdapterRun {
    int adapter, first, count;  // rows adapted_rows[first .. first + count - 1]
  };
  std::vector<int> adapted_rows;
  std::vector<AdapterRun> adapter_runs;
  float* shrunk = nullptr;  // [rows][shrunk_stride]: A x of the next product
  int shrunk_stride = 0;
  std::vector<AttentionItem> items;
  std::vector<int> sharers;        // sequence indices; see AttentionItem
  std::vector<int> first_partial;  // per sequence: index of its first partial, -1 if not split
  int partial_floats = 0;          // floats per partial
  // Accumulated seconds per thread and phase, while `is_timed` is set.
  bool is_timed = false;
  std::vector<std::array<double, kPhases>> seconds;
  int threads() const { return threads_; }
  uint8_t* scratch(int thread) const { return scratches_[thread].data(); }

 private:
  // Returns the next chunk of a thread under row affinity: first from its own rows, then from other threads' rows. It
  // is called once per chunk, so a chunk always remains.
  int claim_chunk(int index, int thread);
  void plan_adapters(int capacity);
  void plan_experts(int capacity);
  void plan_latent(int capacity);
  void plan_attention();
  void plan_partition(int partition, int heads_at_once, int max_sharers);
  static Rows allocate_rows(Buffer& buffer, int rows, int width, InputForms forms);

  // Sequences with the same pages in a partition: last page of the partition, first and last sequence, number of
  // sequences.
  struct SharedPartition {
    int64_t page;
    int first, last, count;
  };

  int threads_;
  bool has_windows_ = false, has_output_norms_ = false;
  InputForms x_forms_, attended_forms_, up_forms_, expert_up_forms_;
  InputForms query_forms_, absorb_forms_, attended_latent_forms_;
  int first_dense_ = -1, first_mixture_ = -1;  // first dense layer and first MoE layer
  int max_per_row_ = 0, max_experts_ = 0, max_expert_inputs_ = 0;
  // Number of chunks claimed from a thread's rows; each counter has its own cache line.
  struct alignas(64) Cursor {
    std::atomic<int> taken{0};
  };
  bool row_affinity_ = false;    // whether this step uses row affinity; see has_row_affinity
  std::vector<Cursor> cursors_;  // [phases][threads] under row affinity
  std::vector<SharedPartition> shared_partitions_;
  std::vector<int> next_sharer_;  // per sequence: the next sequence in its SharedPartition
  Buffer x_, attended_, up_, residual_, projected_, qkv_, partials_, shrunk_;
  Buffer router_, expert_x_, expert_up_, expert_out_;
  Buffer query_x_, queries_, absorb_x_, absorbed_, attended_latent_;
  std::vector<Buffer> scratches_;
};

}  // namespace kvferry
