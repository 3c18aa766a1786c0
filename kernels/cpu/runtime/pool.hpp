// Thread pool that runs the phases of a job.
//
// A phase consists of chunks, which threads claim through one atomic counter. The thread that completes the last chunk
// of a phase opens the next phase. There is no barrier, so a thread that is preempted or still sleeping delays only the
// chunk that it has claimed. Idle threads spin briefly, then sleep.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace kvferry {

class Job {
 public:
  virtual ~Job() = default;
  virtual int phases() const = 0;
  virtual int chunks(int phase) const = 0;
  virtual void run(int phase, int chunk, int thread) = 0;
};

class Pool {
 public:
  // `threads` includes the thread that calls `run`.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Runs all phases of a job and returns when the last one is complete. Jobs are serialized; a job must not call `run`.
  void run(Job& job);

 private:
  void close();
  void worker_loop(int thread);
  void run_chunks(int thread);
  void open_phase_from(int phase, int thread);
  void wait_past(uint64_t ticket, int spins);

  // Phase, number of chunks and next chunk, packed into one word, so that a claimed chunk always belongs to the phase
  // from which it was claimed. A chunk index beyond the number of chunks means that no chunk is left.
  std::atomic<uint64_t> ticket_;
  std::atomic<int> done_{0};
  std::atomic<uint32_t> generation_{0};  // incremented when a phase opens; sleeping threads wait on it
  std::atomic<int> sleepers_{0};
  std::atomic<bool> closing_{false};
  Job* job_ = nullptr;
  int phases_ = 0;
  std::mutex one_job_;
  std::vector<std::thread> workers_;
};

}  // namespace kvferry
