// Many games whose leaves share one batch.
#pragma once

#include <climits>
#include <deque>

#include "game.h"
#include "team.h"

namespace minigo {

// What the C interface calls, whatever the size of the board.
class AnyPool {
 public:
  virtual ~AnyPool() = default;
  virtual int leaves(int side, void* planes, int batch, bool floats) = 0;
  virtual int answer(int side, const float* policy, const float* value) = 0;
  virtual bool take(Summary* summary, const int16_t** moves, const uint16_t** visits, const float** values) = 0;
  virtual void stop(int after) = 0;
  virtual void forget() = 0;
  virtual int running() const = 0;
};

template <int N>
class Pool : public AnyPool {
 public:
  static constexpr int P = N * N, M = P + 1;

  Pool(const Rules& rules, const Search* searches, int sides, int games, uint64_t seed, int first, int threads,
       const Board<N>& start)
      : rules_(rules), searches_(searches, searches + sides), slots_(games), seed_(seed), next_(first), start_(start),
        team_(threads) {
    for (int k = 0; k < sides; ++k) caches_.push_back(std::make_unique<Cache>(searches[k].cache_entries, M));
    served_.resize(sides);
    turn_.resize(sides);
  }

  // Games are served in turn where the batch has no room for the leaves of all. Each has its own rows, in the order
  // of the slots, however many threads there are.
  int leaves(int side, void* planes, int batch, bool floats) override {
    fill();
    int quota = searches_[side].parallel_leaves, count = static_cast<int>(slots_.size());
    std::vector<Slot*>& served = served_[side];
    served.clear();
    int passed = 0, taken = 0;
    // A game may have fewer leaves than it is asked for: others are served until the batch has no room for one more.
    while (passed < count && batch - taken >= quota) {
      size_t first = served.size(), room = static_cast<size_t>((batch - taken) / quota);
      for (; passed < count && served.size() - first < room; ++passed) {
        Slot& slot = slots_[(turn_[side] + passed) % count];
        if (slot.game && !slot.game->over() && slot.game->side_to_move() == side) served.push_back(&slot);
      }
      team_.each(static_cast<int>(served.size() - first),
                 [&](int i) { served[first + i]->game->select(side, quota, caches_[side].get()); });
      for (size_t i = first; i < served.size(); ++i) taken += served[i]->waiting(side);
    }
    turn_[side] = (turn_[side] + passed) % count;
    std::sort(served.begin(), served.end());
    int rows = 0;
    for (Slot* slot : served) {
      slot->row = rows;
      slot->rows = slot->waiting(side);
      rows += slot->rows;
    }
    size_t size = static_cast<size_t>(P) * planes_of(rules_.features);
    team_.each(static_cast<int>(served.size()), [&](int i) {
      if (served[i]->rows == 0) return;
      const Searcher<N>& player = served[i]->game->player();
      if (floats) {
        player.write(static_cast<float*>(planes) + size * served[i]->row);
      } else {
        player.write(static_cast<uint8_t*>(planes) + size * served[i]->row);
      }
    });
    return rows;
  }

  int answer(int side, const float* policy, const float* value) override {
    std::vector<Slot*>& served = served_[side];
    team_.each(static_cast<int>(served.size()), [&](int i) {
      Slot* slot = served[i];
      if (slot->rows == 0) return;
      slot->game->incorporate(side, policy + static_cast<size_t>(M) * slot->row, value + slot->row,
                              caches_[side].get());
    });
    served.clear();
    for (Slot& slot : slots_) {
      if (slot.game && slot.game->over()) ended_.push_back(std::move(slot.game));
    }
    return static_cast<int>(ended_.size());
  }

  bool take(Summary* summary, const int16_t** moves, const uint16_t** visits, const float** values) override {
    if (ended_.empty()) return false;
    taken_ = std::move(ended_.front());
    ended_.pop_front();
    *summary = taken_->summary();
    *moves = taken_->moves().data();
    *visits = taken_->visits().data();
    *values = taken_->values().data();
    return true;
  }

  void stop(int after) override { last_ = after; }

  void forget() override {
    for (auto& cache : caches_) cache->clear();
  }

  int running() const override {
    int count = static_cast<int>(ended_.size()) + (next_ < last_);
    for (const Slot& slot : slots_) count += slot.game != nullptr;
    return count;
  }

 private:
  struct Slot {
    std::unique_ptr<Game<N>> game;
    int row = 0, rows = 0;

    int waiting(int side) const {
      if (game->over() || game->side_to_move() != side) return 0;
      return static_cast<int>(game->player().queued());
    }
  };

  void fill() {
    for (Slot& slot : slots_) {
      if (slot.game || next_ >= last_) continue;
      int sides = static_cast<int>(searches_.size());
      slot.game = std::make_unique<Game<N>>(rules_, searches_.data(), sides, start_, seed_, next_++);
    }
  }

  Rules rules_;
  std::vector<Search> searches_;
  std::vector<Slot> slots_;
  uint64_t seed_;
  int next_, last_ = INT_MAX;
  Board<N> start_;
  std::vector<std::unique_ptr<Cache>> caches_;
  std::vector<std::vector<Slot*>> served_;
  std::vector<int> turn_;
  std::deque<std::unique_ptr<Game<N>>> ended_;
  std::unique_ptr<Game<N>> taken_;
  Team team_;
};

}  // namespace minigo
