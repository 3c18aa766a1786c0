#include "runtime/ranks.hpp"

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <thread>
#endif

namespace kvferry {
namespace {

constexpr int kSpins = 4000;            // tens of microseconds, the difference between ranks that have a core each
constexpr long kNapNanos = 20000000;    // a sleeping rank looks at the clock this often
constexpr double kMaxNapSeconds = 0.5;  // most that one nap counts, also on a busy machine

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleeps until the value changes, for a short time at most. The futex is shared by processes, unlike the one of
// std::atomic::wait.
void nap(std::atomic<uint32_t>& value, uint32_t seen) {
#if defined(__linux__)
  const timespec limit{0, kNapNanos};
  syscall(SYS_futex, &value, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  if (value.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& value) {
  value.fetch_add(1);
#if defined(__linux__)
  syscall(SYS_futex, &value, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

size_t header_bytes() { return (sizeof(RanksHeader) + 4095) / 4096 * 4096; }

}  // namespace

Ranks::Ranks(uint8_t* memory, int rank, int size, size_t part_floats, double seconds)
    : header_(reinterpret_cast<RanksHeader*>(memory)),
      parts_(reinterpret_cast<float*>(memory + header_bytes())),
      rank_(rank),
      size_(size),
      part_floats_(part_floats),
      seconds_(seconds) {}

size_t Ranks::bytes(int size, size_t part_floats) { return header_bytes() + 2 * size_t(size) * part_floats * 4; }

int Ranks::absent_rank() const {
  for (int r = 0; r < size_; ++r)
    if (header_->arrivals[r].meetings.load() < met_) return r;
  return -1;
}

void Ranks::meet() {
  ++met_;
  header_->arrivals[rank_].meetings.store(met_);  // sequentially consistent, as the read of `sleepers`
  if (header_->sleepers.load()) wake_all(header_->news);
  for (int i = 0; i < kSpins; ++i) {
    if (absent_rank() < 0 || missing() >= 0) return;
    pause();
  }
  // Time in which this process did not run either, because a container was frozen, does not count.
  double waited = 0.0;
  auto before = std::chrono::steady_clock::now();
  header_->sleepers.fetch_add(1);
  for (;;) {
    const uint32_t seen = header_->news.load();
    const int absent = absent_rank();
    if (absent < 0 || missing() >= 0) break;
    if (waited > seconds_) {
      fail(absent);
      break;
    }
    nap(header_->news, seen);
    const auto now = std::chrono::steady_clock::now();
    waited += std::min(std::chrono::duration<double>(now - before).count(), kMaxNapSeconds);
    before = now;
  }
  header_->sleepers.fetch_sub(1);
}

void Ranks::fail(int rank) {
  uint32_t works = 0;
  header_->missing.compare_exchange_strong(works, uint32_t(rank) + 1);  // the first cause stays
  wake_all(header_->news);
}

}  // namespace kvferry
