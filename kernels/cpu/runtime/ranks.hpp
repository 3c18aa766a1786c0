// Collective operations of the processes ("ranks") that compute one model together on a host, in memory that all of
// them map. Tensor parallelism (Shoeybi et al., Megatron-LM, 2019, section 3) needs one sum over ranks after attention
// and one after the MLP of each layer.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvferry {

constexpr int kMaxRanks = 64;

// What is at the start of the shared memory; all bytes are zero when it is created.
struct RanksHeader {
  struct alignas(64) Arrival {
    std::atomic<uint64_t> meetings{0};  // meetings that the rank has reached
  };
  alignas(64) std::atomic<uint32_t> news{0};  // incremented for sleeping ranks; a futex
  std::atomic<uint32_t> sleepers{0};
  std::atomic<uint32_t> missing{0};  // 1 + the rank because of which the group failed; 0 while it works
  Arrival arrivals[kMaxRanks];
};

// The ranks of a group meet in the same order. Between two meetings, each rank writes its part of a sum; after the
// second one, all parts can be read. Parts alternate between two places, so that a rank that is ahead never overwrites
// what another one still reads:
//
//     [header][parts of even meetings: size x part_floats][parts of odd meetings: size x part_floats]
class Ranks {
 public:
  // `memory`: `bytes(..)` bytes, aligned to a page, that outlive this object. `seconds`: how long a rank waits.
  Ranks(uint8_t* memory, int rank, int size, size_t part_floats, double seconds);
  static size_t bytes(int size, size_t part_floats);

  int rank() const { return rank_; }
  int size() const { return size_; }
  size_t part_floats() const { return part_floats_; }
  double seconds() const { return seconds_; }
  float* own_part() const { return part(rank_, met_); }
  // The part of a rank, as of the last meeting.
  const float* part_of(int rank) const { return part(rank, met_ - 1); }

  // Waits for all ranks. If one does not come in time or has ended, the group has failed: this and all later calls
  // return at once, and what was computed is worthless.
  void meet();
  // Ends all waits, because a rank has ended.
  void fail(int rank);
  int missing() const { return int(header_->missing.load(std::memory_order_relaxed)) - 1; }  // -1 while it works

 private:
  float* part(int rank, uint64_t meeting) const {
    return parts_ + (size_t(meeting % 2) * size_t(size_) + size_t(rank)) * part_floats_;
  }
  int absent_rank() const;

  RanksHeader* header_;
  float* parts_;
  int rank_, size_;
  size_t part_floats_;
  double seconds_;
  uint64_t met_ = 0;
};

}  // namespace kvferry
