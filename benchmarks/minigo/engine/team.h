// Threads that share the items of a loop.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace minigo {

class Team {
 public:
  explicit Team(int threads) {
    for (int i = 1; i < threads; ++i) threads_.emplace_back([this] { serve(); });
  }
  ~Team() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      ended_ = true;
    }
    begin_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  // Call work(i) for each i below count, and wait for all.
  void each(int count, const std::function<void(int)>& work) {
    if (threads_.empty()) {
      for (int i = 0; i < count; ++i) work(i);
      return;
    }
    {
      std::lock_guard<std::mutex> guard(mutex_);
      work_ = &work;
      count_ = count;
      next_ = 0;
      busy_ = static_cast<int>(threads_.size());
      ++round_;
    }
    begin_.notify_all();
    take_items();
    std::unique_lock<std::mutex> guard(mutex_);
    done_.wait(guard, [this] { return busy_ == 0; });
  }

 private:
  void take_items() {
    for (int i = next_++; i < count_; i = next_++) (*work_)(i);
  }

  void serve() {
    int seen = 0;
    for (;;) {
      std::unique_lock<std::mutex> guard(mutex_);
      begin_.wait(guard, [&] { return ended_ || round_ != seen; });
      if (ended_) return;
      seen = round_;
      guard.unlock();
      take_items();
      guard.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable begin_, done_;
  const std::function<void(int)>* work_ = nullptr;
  std::atomic<int> next_{0};
  int count_ = 0, busy_ = 0, round_ = 0;
  bool ended_ = false;
};

}  // namespace minigo
