// Threads that share the rows of a step.
//
// Knows: how many rows there are. Does not know: what is done with them.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

namespace quill {

// Whoever asks works too, and waits for rows, never for a thread: one that comes too late, because
// somebody else has its core, finds nothing left to do.
class Helpers {
 public:
  using Work = std::function<void(int64_t row)>;

  void run(int64_t rows, int64_t threads, const Work& work) {
    std::unique_lock<std::mutex> own(asking_, std::try_to_lock);
    if (threads < 2 || rows < 2 || !own) {  // another step has the helpers
      for (int64_t row = 0; row < rows; row++) work(row);
      return;
    }
    const auto job = std::make_shared<Job>(work, rows);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      start_helpers((threads < rows ? threads : rows) - 1);
      job_ = job;
      number_++;
    }
    wake_.notify_all();
    take_rows(*job);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [&] { return job->finished == rows; });
    job_.reset();
  }

 private:
  struct Job {
    Job(const Work& w, int64_t n) : work(w), rows(n) {}
    const Work& work;  // gone when all rows are finished
    const int64_t rows;
    std::atomic<int64_t> next{0}, finished{0};
  };

  void start_helpers(int64_t wanted) {
    try {
      for (; num_ < wanted; num_++) std::thread([this] { help(); }).detach();
    } catch (const std::system_error&) {
      // Then there are fewer.
    }
  }

  void help() {
    uint64_t seen = 0;
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return number_ != seen; });
        seen = number_;
        job = job_;
      }
      if (job) take_rows(*job);
    }
  }

  void take_rows(Job& job) {
    for (int64_t row; (row = job.next++) < job.rows;) {
      job.work(row);
      if (++job.finished == job.rows) {
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_all();
      }
    }
  }

  std::mutex asking_, mutex_;
  std::condition_variable wake_, done_;
  std::shared_ptr<Job> job_;
  uint64_t number_ = 0;
  int64_t num_ = 0;
};

}  // namespace quill
