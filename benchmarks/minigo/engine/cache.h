// Evaluations by position: one place for each key, the newer one stays.
#pragma once

#include <cstdlib>
#include <mutex>
#include <vector>

#include "board.h"

namespace minigo {

class Cache {
 public:
  Cache(int entries, int moves) : entries_(entries), moves_(moves) {
    if (entries_ == 0) return;
    // calloc: pages that no evaluation fills are never made.
    keys_ = static_cast<uint64_t*>(std::calloc(entries_, sizeof(uint64_t)));
    values_ = static_cast<float*>(std::calloc(static_cast<size_t>(entries_) * (moves_ + 1), sizeof(float)));
    if (keys_ == nullptr || values_ == nullptr) entries_ = 0;
  }
  ~Cache() {
    std::free(keys_);
    std::free(values_);
  }
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  bool enabled() const { return entries_ > 0; }

  // Copy an evaluation (policy, then value); false where there is none.
  bool find(uint64_t key, float* out) {
    size_t place = key % entries_;
    std::lock_guard<std::mutex> guard(locks_[place % kLocks]);
    if (keys_[place] != key) return false;
    std::memcpy(out, values_ + place * (moves_ + 1), sizeof(float) * (moves_ + 1));
    return true;
  }

  void keep(uint64_t key, const float* evaluation) {
    size_t place = key % entries_;
    std::lock_guard<std::mutex> guard(locks_[place % kLocks]);
    keys_[place] = key;
    std::memcpy(values_ + place * (moves_ + 1), evaluation, sizeof(float) * (moves_ + 1));
  }

  void clear() {
    if (entries_ > 0) std::memset(keys_, 0, sizeof(uint64_t) * entries_);
  }

 private:
  static constexpr int kLocks = 256;
  int entries_, moves_;
  uint64_t* keys_ = nullptr;
  float* values_ = nullptr;
  std::mutex locks_[kLocks];
};

// Where an evaluation is kept, and the symmetry that brings the position into the form that all eight share. As in
// cc/model/inference_cache.cc of the v0.7 reference: stones, side to play, a pass before it and the empty points
// where it may not play; the moves that led here are left out.
template <int N>
struct CacheKey {
  uint64_t key = 0;
  int symmetry = 0;

  CacheKey() = default;
  CacheKey(const Board<N>& board, const uint8_t* legal) {
    const auto& t = Board<N>::tables();
    for (int s = 1; s < kSymmetries; ++s) {
      if (board.hash[s] < board.hash[symmetry]) symmetry = s;
    }
    key = board.hash[symmetry];
    if (board.to_play == kWhite) key ^= t.white_to_play;
    if (board.passes > 0) key ^= t.passed;
    for (int c = 0; c < N * N; ++c) {
      if (board.color[c] == kEmpty && !legal[c]) key ^= t.forbidden[t.symmetry[symmetry][c]];
    }
    key = mixed(key) | 1;
  }
};

}  // namespace minigo
