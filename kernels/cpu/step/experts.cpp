#include "step/experts.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "step/step.hpp"

namespace kvferry {
namespace {

constexpr float kLeastSum =
    1e-20f;  // minimum sum of the active weights; sigmoids of very negative outputs may all be 0

}  // namespace

void ExpertPlan::clear(int rows, int max_per_row, int max_experts) {
  const size_t entries = size_t(rows) * size_t(max_per_row);
  runs.clear();
  runs.reserve(size_t(max_experts));
  has_gathered = false;
  // Memory is allocated here, not while the pool runs.
  for (auto* each : {&row_of, &entries_of, &chosen_}) each->resize(std::max(entries, each->size()));
  share_of.resize(std::max(entries, share_of.size()));
  counts_.resize(size_t(max_experts) + 1);
  used_.resize(std::max(size_t(rows), used_.size()));
  probabilities_.resize(std::max(size_t(rows) * size_t(max_experts), probabilities_.size()));
  marks_.resize(size_t(max_experts));
  best_.resize(size_t(max_experts));
}

// Returns the values by which a row's experts are chosen, computed from their scores.
const float* ExpertPlan::marks_of(const Mixture& m, const float* scores) {
  if (!m.correction && m.active_groups == m.groups) return scores;
  for (int e = 0; e < m.count; ++e) marks_[size_t(e)] = scores[e] + (m.correction ? m.correction[e] : 0.0f);
  if (m.active_groups == m.groups) return marks_.data();
  const int size = m.count / m.groups;
  for (int g = 0; g < m.groups; ++g) {
    float first = -std::numeric_limits<float>::infinity(), second = first;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const float mark = marks_[size_t(e)];
      second = std::max(second, std::min(first, mark));
      first = std::max(first, mark);
    }
    best_[size_t(g)] = m.is_sigmoid ? first + second : first;
  }
  for (int g = 0; g < m.groups; ++g) {
    int better = 0;
    for (int other = 0; other < m.groups; ++other)
      better += best_[size_t(other)] > best_[size_t(g)] || (other < g && best_[size_t(other)] == best_[size_t(g)]);
    if (better >= m.active_groups)
      std::fill_n(marks_.begin() + g * size, size, -std::numeric_limits<float>::infinity());
  }
  return marks_.data();
}

void ExpertPlan::plan(const Mixture& m, const Level& level, const float* logits, int stride, int rows, int threads) {
  per_row = m.active + (m.has_shared ? 1 : 0);
  const int experts = m.count + (m.has_shared ? 1 : 0);
  runs.clear();
  has_gathered = false;
  std::fill(counts_.begin(), counts_.end(), 0);
  for (int row = 0; row < rows; ++row) {
    const float* of_row = logits + size_t(row) * size_t(stride);
    float* weights = probabilities_.data() + size_t(row) * size_t(experts);
    float taken = 0.0f;
    if (m.is_sigmoid) {
      for (int e = 0; e < m.count; ++e) weights[e] = 1.0f / (1.0f + std::exp(-of_row[e]));
    } else {
      const float top = *std::max_element(of_row, of_row + m.count);
      float sum = 0.0f;
      for (int e = 0; e < m.count; ++e) sum += weights[e] = std::exp(of_row[e] - top);
      for (int e = 0; e < m.count; ++e) weights[e] /= sum;
    }
    const float* marks = marks_of(m, weights);
    int* chosen = chosen_.data() + size_t(row) * size_t(per_row);
    for (int i = 0; i < m.active; ++i) {
      int best = -1;
      for (int e = 0; e < m.count; ++e)
        if (std::find(chosen, chosen + i, e) == chosen + i && (best < 0 || marks[e] > marks[best])) best = e;
      chosen[i] = best;
      taken += weights[best];
      ++counts_[size_t(best)];
    }
    if (m.renormalizes)
      for (int i = 0; i < m.active; ++i) weights[chosen[i]] /= std::max(taken, kLeastSum);
    if (m.weight_scale != 1.0f)
      for (int i = 0; i < m.active; ++i) weights[chosen[i]] *= m.weight_scale;
    if (m.has_shared) {
      chosen[m.active] = m.count;
      weights[m.count] = m.has_shared_gate ? 1.0f / (1.0f + std::exp(-of_row[m.count])) : 1.0f;
      ++counts_[size_t(m.count)];
    }
    used_[size_t(row)] = 0;
  }
  int first = 0;
  for (int e = 0; e < experts; ++e) {
    const int count = counts_[size_t(e)];
    counts_[size_t(e)] = first;  // from here on, the index of the expert's next entry
    if (!count) continue;
    ExpertRun run;
    run.expert = e;
    run.first = first;
    run.count = count;
    runs.push_back(run);
    first += count;
  }
  for (int row = 0; row < rows; ++row)
    for (int i = 0; i < per_row; ++i) {
      const int e = chosen_[size_t(row) * size_t(per_row) + size_t(i)];
      const size_t entry = size_t(counts_[size_t(e)]++);
      row_of[entry] = row;
      share_of[entry] = probabilities_[size_t(row) * size_t(experts) + size_t(e)];
    }
  const int shares = std::max(1, (threads + int(runs.size()) - 1) / std::max(1, int(runs.size())));
  int gate_up = 0, down = 0;
  for (ExpertRun& run : runs) {
    const Expert& expert = m.experts[run.expert];
    if (row_of[size_t(run.first + run.count - 1)] - row_of[size_t(run.first)] == run.count - 1) {
      run.source = row_of[size_t(run.first)];
    } else {
      has_gathered = true;
    }
    for (int entry = run.first; entry < run.first + run.count; ++entry) {
      const size_t row = size_t(row_of[size_t(entry)]);
      entries_of[row * size_t(per_row) + size_t(used_[row]++)] = entry;
    }
    run.gate_up = choose_blocking(level, expert.gate_up, run.count, shares, 4);
    run.down = choose_blocking(level, expert.down, run.count, shares);
    run.gate_up_end = gate_up += run.gate_up.count;
    run.down_end = down += run.down.count;
  }
}

const ExpertRun& ExpertPlan::locate(int ExpertRun::* end, int& chunk) const {
  const auto found = std::upper_bound(runs.begin(), runs.end(), chunk,
                                      [end](int value, const ExpertRun& run) { return value < run.*end; });
  if (found != runs.begin()) chunk -= (*(found - 1)).*end;
  return *found;
}

}  // namespace kvferry
