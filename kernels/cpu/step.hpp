// One step of a model as a job of the pool: which phases there are, into how many chunks each is cut, and where what
// passes between them lies. What a chunk computes is in level.hpp, once per instruction set.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "model.hpp"
#include "pool.hpp"
#include "rows.hpp"

namespace kvferry {

constexpr int kMaxHeadDim = 256;
constexpr int kPartition = 256;      // tokens of a context whose scores are weighed together
constexpr int kMaxTileQueries = 128;  // of an item of attention: all of them share what is packed

// Query positions of an item, where so many heads share a KV head.
constexpr int tile_queries(int group) { return group >= kMaxTileQueries ? 1 : kMaxTileQueries / (group > 4 ? group / 4 : 1); }

// Work of one chunk of attention.
struct AttentionItem {
  int sequence, kv_begin, kv_end;  // KV heads [begin, end)
  int first_query, queries;
  int begin, end;  // partitions
  // Of decoding sequences with the same pages in this partition: where the first of them stands in Step::sharers, the others
  // behind it, one query each, which sees all of it. -1: the item is of one sequence.
  int first_sharer;
};

enum class Phase : int { embed, qkv, rotate, attend, merge, output, mlp_norm, gate_up, down, next_norm, head, pick };
constexpr int kPhases = 12;
constexpr const char* kPhaseNames[kPhases] = {"embed", "qkv", "rotate", "attend", "merge", "output", "mlp_norm", "gate_up", "down", "next_norm", "head", "pick"};

// Memory of 64-byte alignment that grows and is kept.
class Buffer {
 public:
  Buffer() = default;
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&& other) noexcept;
  // At least so many bytes; zeros where they are new. What was there before is lost.
  void* reserve(size_t bytes);
  uint8_t* data() const { return data_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// How a product's chunks are cut: panels of each, rows of each.
struct Cut {
  int panels = 0, rows = 0, count = 0;
  int row_blocks = 0, panel_blocks = 0;
  bool rows_first = false;  // neighbouring chunks share their rows, else their panels
};

class Step;
struct Level;

// `least`: panels of a chunk; 2 or 4.
Cut cut_product(const Level& level, const Matrix& matrix, int rows, int threads, int least = 2);

// What one instruction set brings.
struct Level {
  const char* name;
  int tile_rows;  // of a product, at most
  bool has_unit;  // a matrix unit, which takes inputs and weights faster than they come from anywhere but a core's own cache
  size_t (*scratch_bytes)(const Model& model);  // of one thread
  Forms (*forms_read)(const Matrix& matrix, int input_bits);
  void (*run)(Step& step, Phase phase, int layer, int chunk, int thread);
  // x [rows, cols] times a matrix, to out [rows, matrix rows], inputs as Model::input_bits says; for tests and
  // benchmarks.
  void (*product)(Pool& pool, const Matrix& matrix, const float* x, int rows, float* out, int input_bits);
  // Bounds: reads all of a range; adds products in registers (of bytes, or of what the level multiplies best) and says
  // how many operations that were.
  void (*read)(Pool& pool, const uint8_t* data, size_t bytes);
  double (*sum_products)(Pool& pool, int chunks, bool bytes);
};

class Step final : public Job {
 public:
  Step(const Model& model, const Level& level, int threads);

  // Prepares a batch; run(step) on the pool computes it.
  void prepare(const Batch& batch);

  int phases() const override;
  int chunks(int phase) const override;
  void run(int phase, int chunk, int thread) override;

  const Model& model;
  const Level& level;
  Batch batch;
  Rows x, attended, hidden_up;  // inputs of qkv, gate_up and head; of output; of down
  float* residual = nullptr;    // [rows][stride of x]
  float* qkv = nullptr;         // [rows][panels * 16]
  float* partials = nullptr;    // of sequences that are cut: rows of [head_dim values, highest, sum] by partition and head
  Cut cut_qkv, cut_output, cut_gate_up, cut_down, cut_head;
  int row_chunk = 0;            // rows of one chunk in phases that go by rows
  std::vector<AttentionItem> items;
  std::vector<int> sharers;        // sequences; see AttentionItem
  std::vector<int> first_partial;  // per sequence: its first partial; -1: an item has all its partitions
  int partial_floats = 0;          // of one partial
  // Seconds of all threads by phase, while `is_timed`.
  bool is_timed = false;
  std::vector<std::array<double, kPhases>> seconds;
  int threads() const { return threads_; }
  uint8_t* scratch(int thread) const { return scratches_[thread].data(); }

 private:
  // Which chunk a thread takes in a phase by rows: of its own rows while there are any, then of others'. As often as it is
  // called there are chunks, so one is always left.
  int claim(int index, int thread);
  void plan_attention();
  void plan_partition(int partition, int heads_at_once, int most_sharers);
  static Rows rows_of(Buffer& buffer, int rows, int width, Forms forms);

  // Sequences with the same pages in a partition: its last page, the first of them, the last so far, and how many.
  struct Sharing {
    int64_t page;
    int first, last, count;
  };

  int threads_;
  Forms x_forms_, attended_forms_, up_forms_;
  // How many chunks of a thread's rows are taken; a line of a cache for each.
  struct alignas(64) Cursor {
    std::atomic<int> taken{0};
  };
  bool keeps_rows_ = false;      // in this step; see step.cpp
  std::vector<Cursor> cursors_;  // [phases][threads], if it does
  std::vector<Sharing> sharings_;
  std::vector<int> next_sharer_;  // per sequence
  Buffer x_, attended_, up_, residual_, qkv_, partials_;
  std::vector<Buffer> scratches_;
};

}  // namespace kvferry
