#include "pool.hpp"

#include <stdexcept>
#include <string>
#include <system_error>

namespace kvferry {
namespace {

constexpr int kChunkBits = 20;
constexpr uint64_t kChunkMask = (1ull << kChunkBits) - 1;
constexpr uint64_t kNoPhase = 0xffffff;  // the phase number while no job runs
constexpr int kSpinsWithin = 4000;            // between phases: tens of microseconds
constexpr int kSpinsBetween = 2000;           // after a job

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline uint64_t make_ticket(uint64_t phase, uint64_t chunks) { return phase << 2 * kChunkBits | chunks << kChunkBits; }
inline uint64_t phase_of(uint64_t ticket) { return ticket >> 2 * kChunkBits; }
inline int chunks_of(uint64_t ticket) { return int(ticket >> kChunkBits & kChunkMask); }
inline int chunk_of(uint64_t ticket) { return int(ticket & kChunkMask); }

}  // namespace

Pool::Pool(int threads) : ticket_(make_ticket(kNoPhase, 0)) {
  try {
    for (int i = 1; i < threads; ++i) helpers_.emplace_back([this, i] { help(i); });
  } catch (const std::system_error&) {
    const size_t started = helpers_.size() + 1;
    close();
    throw std::runtime_error("only " + std::to_string(started) + " of " + std::to_string(threads) +
                             " threads could be started; ask for fewer (--threads)");
  }
}

Pool::~Pool() { close(); }

void Pool::close() {
  closing_.store(true);
  news_.fetch_add(1);
  news_.notify_all();
  for (auto& helper : helpers_) helper.join();
}

void Pool::run(Job& job) {
  std::lock_guard<std::mutex> lock(one_job_);
  for (int phase = 0; phase < job.phases(); ++phase)
    if (uint64_t(job.chunks(phase)) + uint64_t(threads()) > kChunkMask) throw std::length_error("too many chunks in a phase");
  job_ = &job;
  phases_ = job.phases();
  open_from(0, 0);
  work(0);
}

// Opens the first phase from `phase` on that has more than one chunk; runs those with one chunk itself.
void Pool::open_from(int phase, int thread) {
  uint64_t ticket = make_ticket(kNoPhase, 0);
  for (; phase < phases_; ++phase) {
    const int chunks = job_->chunks(phase);
    if (chunks > 1 && !helpers_.empty()) {
      done_.store(0, std::memory_order_relaxed);
      ticket = make_ticket(uint64_t(phase), uint64_t(chunks));
      break;
    }
    for (int i = 0; i < chunks; ++i) job_->run(phase, i, thread);
  }
  ticket_.store(ticket);
  news_.fetch_add(1);
  if (sleepers_.load() > 0) news_.notify_all();
}

void Pool::work(int thread) {
  for (;;) {
    if (phase_of(ticket_.load(std::memory_order_acquire)) == kNoPhase) return;
    // The chunk taken belongs to the phase that the ticket names, which may be a later one than was just seen.
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (phase_of(ticket) == kNoPhase) return;
    const int phase = int(phase_of(ticket));
    if (chunk_of(ticket) < chunks_of(ticket)) {
      job_->run(phase, chunk_of(ticket), thread);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_of(ticket)) open_from(phase + 1, thread);
    } else {
      wait_beyond(ticket, kSpinsWithin);
    }
  }
}

void Pool::help(int thread) {
  while (!closing_.load()) {
    work(thread);
    const uint64_t ticket = ticket_.load();
    if (phase_of(ticket) == kNoPhase) wait_beyond(ticket, kSpinsBetween);
  }
}

// Returns when another phase than the ticket's is open, or the pool closes.
void Pool::wait_beyond(uint64_t ticket, int spins) {
  const uint64_t phase = phase_of(ticket);
  for (int i = 0; i < spins; ++i) {
    if (phase_of(ticket_.load(std::memory_order_acquire)) != phase || closing_.load(std::memory_order_relaxed)) return;
    relax();
  }
  sleepers_.fetch_add(1);
  for (;;) {
    const uint32_t news = news_.load();
    if (phase_of(ticket_.load()) != phase || closing_.load()) break;
    news_.wait(news);
  }
  sleepers_.fetch_sub(1);
}

}  // namespace kvferry
