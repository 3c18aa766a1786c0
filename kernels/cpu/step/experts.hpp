// Plan of an MoE layer: which expert computes which rows.
#pragma once
#include <vector>

#include "data/model.hpp"
#include "products/blocking.hpp"
#include "step/level.hpp"

namespace kvferry {

// Entries of one expert. An entry is a row that an expert computes; entries are sorted by expert, then by row.
struct ExpertRun {
  int expert = 0;
  int first = 0, count = 0;           // entries [first, first + count)
  int source = -1;                    // first of the adjacent rows of x that are the inputs, -1 if they are gathered
  Blocking gate_up, down;             // blocking of the run's products
  int gate_up_end = 0, down_end = 0;  // number of chunks of this and all earlier runs
};

class ExpertPlan {
 public:
  // Discards the plan of the last layer, and reserves memory for `rows` rows.
  void clear(int rows, int max_per_row, int max_experts);

  // Chooses the experts of each row by the router's outputs, and sorts the rows by expert. Weights are computed as in
  // Mixture, in float32; of experts with equal scores, the first are chosen.
  void plan(const Mixture& mixture, const Level& level, const float* logits, int stride, int rows, int threads);

  // Returns the run of a chunk, and replaces the chunk by its index within the run.
  const ExpertRun& locate(int ExpertRun::* end, int& chunk) const;

  int chunks(int ExpertRun::* end) const { return runs.empty() ? 0 : runs.back().*end; }

  std::vector<ExpertRun> runs;
  std::vector<int> row_of;      // [entries]
  std::vector<float> share_of;  // [entries]: weight of the entry in the row's sum
  std::vector<int> entries_of;  // [rows][per_row], in the order of experts
  int per_row = 0;
  bool has_gathered = false;  // whether the inputs of any run are gathered

 private:
  const float* marks_of(const Mixture& m, const float* scores);

  std::vector<float> probabilities_;
  std::vector<float> marks_, best_;  // of one row: by expert, and by group
  std::vector<int> chosen_, counts_, used_;
};

}  // namespace kvferry
