// The C interface that position.py binds. No function needs Python's interpreter lock.
#include "pool.h"

namespace minigo {

// A game's position with everything before it, for callers that play moves themselves.
class AnyPosition {
 public:
  virtual ~AnyPosition() = default;
  virtual std::unique_ptr<AnyPosition> copy() const = 0;
  virtual void setup(const int8_t* stones, int to_play) = 0;
  virtual int play(int move) = 0;
  virtual void legal(uint8_t* out) const = 0;
  virtual void stones(int8_t* out) const = 0;
  virtual void held(int8_t* out) const = 0;
  virtual int liberties(int point) const = 0;
  virtual int area(bool pass_alive) const = 0;
  virtual int to_play() const = 0;
  virtual bool over() const = 0;
  virtual void planes(void* out, bool floats, int features, int symmetry) const = 0;
};

template <int N>
Board<N> board_of(const int8_t* stones, int to_play) {
  Board<N> board;
  for (int c = 0; stones != nullptr && c < N * N; ++c) {
    if (stones[c] != kEmpty) board.put(c, stones[c]);
  }
  board.ko = -1;
  board.captured_any = false;
  board.to_play = static_cast<int8_t>(to_play);
  return board;
}

template <int N>
class Position : public AnyPosition {
 public:
  explicit Position(const Rules& rules) : rules_(rules) {}

  std::unique_ptr<AnyPosition> copy() const override { return std::make_unique<Position>(*this); }

  void setup(const int8_t* stones, int to_play) override {
    board_ = board_of<N>(stones, to_play);
    trail_.clear();
    past_.clear();
  }

  int play(int move) override {
    if (move < 0 || move > N * N) return kOutside;
    Refusal refusal = board_.refusal(move);
    if (refusal != kLegal) return refusal;
    Past after;
    if (rules_.superko && move < N * N) {
      board_.lookahead(move, &after);
      if (Board<N>::repeats(after, trail_)) return kSuperko;
    }
    trail_.push_back(board_.past());
    past_.push_back(board_);
    if (past_.size() > kHistory) past_.erase(past_.begin());
    board_.play(move);
    return kLegal;
  }

  void legal(uint8_t* out) const override { board_.legal(out, trail_, rules_.superko != 0); }
  void stones(int8_t* out) const override { std::memcpy(out, board_.color, N * N); }

  void held(int8_t* out) const override {
    Life<N> life(board_);
    for (int c = 0; c < N * N; ++c) {
      out[c] = life.of[kBlack][c] ? kBlack : life.of[kWhite][c] ? kWhite : kEmpty;
    }
  }

  int liberties(int point) const override {
    return board_.color[point] == kEmpty ? 0 : board_.liberties[board_.head[point]];
  }

  int area(bool pass_alive) const override { return minigo::area(board_, pass_alive); }
  int to_play() const override { return board_.to_play; }
  bool over() const override { return board_.over(); }

  void planes(void* out, bool floats, int features, int symmetry) const override {
    uint8_t legal_moves[N * N + 1];
    legal(legal_moves);
    History history;
    history.stones[history.count++] = board_.color;
    for (auto past = past_.rbegin(); past != past_.rend() && history.count < kHistory; ++past) {
      history.stones[history.count++] = past->color;
    }
    if (floats) {
      write_planes(board_, legal_moves, history, features, symmetry, static_cast<float*>(out));
    } else {
      write_planes(board_, legal_moves, history, features, symmetry, static_cast<uint8_t*>(out));
    }
  }

 private:
  Rules rules_;
  Board<N> board_;
  std::vector<Past> trail_;
  std::vector<Board<N>> past_;
};

// One search from any position, whose moves the caller chooses.
class AnyStudy {
 public:
  virtual ~AnyStudy() = default;
  virtual int play(int move) = 0;
  virtual void begin() = 0;
  virtual int leaves(void* planes, int batch, bool floats) = 0;
  virtual void answer(const float* policy, const float* value) = 0;
  virtual int choose(bool restrict_pass_alive) = 0;
  virtual float value() const = 0;
  virtual void visits(int32_t* out) const = 0;
};

template <int N>
class Study : public AnyStudy {
 public:
  Study(const Rules& rules, const Search& search, uint64_t seed, const Board<N>& start)
      : search_(search), searcher_(rules, search, seed), cache_(search.cache_entries, N * N + 1) {
    searcher_.reset(start);
  }

  int play(int move) override {
    if (move < 0 || move > N * N) return kOutside;
    const Node<N>* root = searcher_.root();
    if (!root->legal[move]) {
      Refusal refusal = root->board.refusal(move);
      return refusal == kLegal ? kSuperko : refusal;
    }
    searcher_.advance(move);
    return kLegal;
  }

  void begin() override { searcher_.begin(); }

  int leaves(void* planes, int batch, bool floats) override {
    if (searcher_.queued() == 0) searcher_.select(std::min(batch, search_.parallel_leaves), &cache_);
    if (floats) {
      searcher_.write(static_cast<float*>(planes));
    } else {
      searcher_.write(static_cast<uint8_t*>(planes));
    }
    return static_cast<int>(searcher_.queued());
  }

  void answer(const float* policy, const float* value) override { searcher_.incorporate(policy, value, &cache_); }
  int choose(bool restrict_pass_alive) override { return searcher_.choose(restrict_pass_alive); }
  float value() const override { return searcher_.root()->mean(); }
  void visits(int32_t* out) const override {
    std::memcpy(out, searcher_.root()->edges->visits_of, sizeof(int32_t) * (N * N + 1));
  }

 private:
  Search search_;
  Searcher<N> searcher_;
  Cache cache_;
};

// Call make.of<N>() with the size of the board; null for a size that the engine does not have.
template <typename Make>
auto by_size(int size, Make make) -> decltype(make(std::integral_constant<int, 9>())) {
  switch (size) {
    case 5: return make(std::integral_constant<int, 5>());
    case 9: return make(std::integral_constant<int, 9>());
    case 13: return make(std::integral_constant<int, 13>());
    case 19: return make(std::integral_constant<int, 19>());
    default: return nullptr;
  }
}

}  // namespace minigo

using minigo::AnyPool;
using minigo::AnyPosition;
using minigo::AnyStudy;
using minigo::Rules;
using minigo::Search;
using minigo::Summary;

extern "C" {

AnyPosition* minigo_position(const Rules* rules) {
  return minigo::by_size(rules->size, [&](auto n) -> AnyPosition* { return new minigo::Position<n()>(*rules); });
}
AnyPosition* minigo_position_copy(const AnyPosition* position) { return position->copy().release(); }
void minigo_position_free(AnyPosition* position) { delete position; }
void minigo_position_setup(AnyPosition* position, const int8_t* stones, int to_play) {
  position->setup(stones, to_play);
}
int minigo_position_play(AnyPosition* position, int move) { return position->play(move); }
void minigo_position_legal(const AnyPosition* position, uint8_t* out) { position->legal(out); }
void minigo_position_stones(const AnyPosition* position, int8_t* out) { position->stones(out); }
void minigo_position_held(const AnyPosition* position, int8_t* out) { position->held(out); }
int minigo_position_liberties(const AnyPosition* position, int point) { return position->liberties(point); }
int minigo_position_area(const AnyPosition* position, int pass_alive) { return position->area(pass_alive != 0); }
int minigo_position_to_play(const AnyPosition* position) { return position->to_play(); }
int minigo_position_over(const AnyPosition* position) { return position->over(); }
void minigo_position_planes(const AnyPosition* position, void* out, int floats, int features, int symmetry) {
  position->planes(out, floats != 0, features, symmetry);
}

AnyStudy* minigo_study(const Rules* rules, const Search* search, uint64_t seed, const int8_t* stones, int to_play) {
  return minigo::by_size(rules->size, [&](auto n) -> AnyStudy* {
    return new minigo::Study<n()>(*rules, *search, seed, minigo::board_of<n()>(stones, to_play));
  });
}
void minigo_study_free(AnyStudy* study) { delete study; }
int minigo_study_play(AnyStudy* study, int move) { return study->play(move); }
void minigo_study_begin(AnyStudy* study) { study->begin(); }
int minigo_study_leaves(AnyStudy* study, void* planes, int batch, int floats) {
  return study->leaves(planes, batch, floats != 0);
}
void minigo_study_answer(AnyStudy* study, const float* policy, const float* value) { study->answer(policy, value); }
int minigo_study_choose(AnyStudy* study, int restrict_pass_alive) { return study->choose(restrict_pass_alive != 0); }
float minigo_study_value(const AnyStudy* study) { return study->value(); }
void minigo_study_visits(const AnyStudy* study, int32_t* out) { study->visits(out); }

AnyPool* minigo_pool(const Rules* rules, const Search* searches, int sides, int games, uint64_t seed, int first,
                     int threads, const int8_t* stones, int to_play) {
  return minigo::by_size(rules->size, [&](auto n) -> AnyPool* {
    return new minigo::Pool<n()>(*rules, searches, sides, games, seed, first, threads,
                                 minigo::board_of<n()>(stones, to_play));
  });
}
void minigo_pool_free(AnyPool* pool) { delete pool; }
int minigo_pool_leaves(AnyPool* pool, int side, void* planes, int batch, int floats) {
  return pool->leaves(side, planes, batch, floats != 0);
}
int minigo_pool_answer(AnyPool* pool, int side, const float* policy, const float* value) {
  return pool->answer(side, policy, value);
}
int minigo_pool_take(AnyPool* pool, Summary* summary, const int16_t** moves, const uint16_t** visits,
                     const float** values) {
  return pool->take(summary, moves, visits, values);
}
void minigo_pool_stop(AnyPool* pool, int after) { pool->stop(after); }
void minigo_pool_forget(AnyPool* pool) { pool->forget(); }
int minigo_pool_running(const AnyPool* pool) { return pool->running(); }
}
