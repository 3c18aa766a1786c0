#include "runtime/pool.hpp"

#include <stdexcept>
#include <string>
#include <system_error>

namespace kvferry {
namespace {

constexpr int kChunkBits = 20;
constexpr uint64_t kChunkMask = (1ull << kChunkBits) - 1;
constexpr uint64_t kNoPhase = 0xffffff;    // phase number in the ticket while no job runs
constexpr int kSpinsBetweenPhases = 4000;  // between phases: tens of microseconds
constexpr int kSpinsAfterJob = 2000;       // after a job

inline void cpu_pause() {
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
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { worker_loop(i); });
  } catch (const std::system_error&) {
    const size_t started = workers_.size() + 1;
    close();
    throw std::runtime_error("only " + std::to_string(started) + " of " + std::to_string(threads) +
                             " threads could be started; set --threads to a lower number");
  }
}

Pool::~Pool() { close(); }

void Pool::close() {
  closing_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto& helper : workers_) helper.join();
}

void Pool::run(Job& job) {
  std::lock_guard<std::mutex> lock(one_job_);
  for (int phase = 0; phase < job.phases(); ++phase)
    if (uint64_t(job.chunks(phase)) + uint64_t(threads()) > kChunkMask)
      throw std::length_error("too many chunks in a phase");
  job_ = &job;
  phases_ = job.phases();
  open_phase_from(0, 0);
  run_chunks(0);
}

// Opens the first phase >= `phase` that has more than one chunk. Phases with a single chunk run on the calling thread.
void Pool::open_phase_from(int phase, int thread) {
  uint64_t ticket = make_ticket(kNoPhase, 0);
  for (; phase < phases_; ++phase) {
    const int chunks = job_->chunks(phase);
    if (chunks > 1 && !workers_.empty()) {
      done_.store(0, std::memory_order_relaxed);
      ticket = make_ticket(uint64_t(phase), uint64_t(chunks));
      break;
    }
    for (int i = 0; i < chunks; ++i) job_->run(phase, i, thread);
  }
  ticket_.store(ticket);
  generation_.fetch_add(1);
  if (sleepers_.load() > 0) generation_.notify_all();
}

void Pool::run_chunks(int thread) {
  for (;;) {
    if (phase_of(ticket_.load(std::memory_order_acquire)) == kNoPhase) return;
    // The phase is read from the fetched ticket, not the loaded ticket, since a later phase may have opened in between.
    const uint64_t ticket = ticket_.fetch_add(1, std::memory_order_acq_rel);
    if (phase_of(ticket) == kNoPhase) return;
    const int phase = int(phase_of(ticket));
    if (chunk_of(ticket) < chunks_of(ticket)) {
      job_->run(phase, chunk_of(ticket), thread);
      if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == chunks_of(ticket)) open_phase_from(phase + 1, thread);
    } else {
      wait_past(ticket, kSpinsBetweenPhases);
    }
  }
}

void Pool::worker_loop(int thread) {
  while (!closing_.load()) {
    run_chunks(thread);
    const uint64_t ticket = ticket_.load();
    if (phase_of(ticket) == kNoPhase) wait_past(ticket, kSpinsAfterJob);
  }
}

// Waits until the open phase differs from the phase in the ticket, or until the pool closes.
void Pool::wait_past(uint64_t ticket, int spins) {
  const uint64_t phase = phase_of(ticket);
  for (int i = 0; i < spins; ++i) {
    if (phase_of(ticket_.load(std::memory_order_acquire)) != phase || closing_.load(std::memory_order_relaxed)) return;
    cpu_pause();
  }
  sleepers_.fetch_add(1);
  for (;;) {
    const uint32_t news = generation_.load();
    if (phase_of(ticket_.load()) != phase || closing_.load()) break;
    generation_.wait(news);
  }
  sleepers_.fetch_sub(1);
}

}  // namespace kvferry
