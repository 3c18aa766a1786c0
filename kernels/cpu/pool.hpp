// A few threads that go through a job's phases together.
//
// A phase is a number of chunks, handed out by one counter; it is over when all its chunks are done, and whoever did
// the last opens the next. Nobody waits for a thread, only for work: one that was put aside by the machine, or has not
// woken up yet, holds up nothing but the chunk in its hands. Waiting is a short spin, then a sleep.
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
  // `threads` counts the caller of `run`.
  explicit Pool(int threads);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(helpers_.size()) + 1; }

  // All phases of a job; returns when the last is done. One job at a time; not from within a job.
  void run(Job& job);

 private:
  void close();
  void help(int thread);
  void work(int thread);
  void open_from(int phase, int thread);
  void wait_beyond(uint64_t ticket, int spins);

  // Phase, its number of chunks and the next chunk, in one word: who takes a chunk knows what it is part of, however
  // late. Chunks taken beyond a phase's number mean nothing.
  std::atomic<uint64_t> ticket_;
  std::atomic<int> done_{0};
  std::atomic<uint32_t> news_{0};  // changes with every phase that opens; what sleepers wait on
  std::atomic<int> sleepers_{0};
  std::atomic<bool> closing_{false};
  Job* job_ = nullptr;
  int phases_ = 0;
  std::mutex one_job_;
  std::vector<std::thread> helpers_;
};

}  // namespace kvferry
