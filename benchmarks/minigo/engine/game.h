// A game of one searcher against itself, or of two against each other.
#pragma once

#include "searcher.h"

namespace minigo {

template <int N>
class Game {
 public:
  static constexpr int P = N * N, PASS = P, M = P + 1;

  // A game is a function of the seed, its number and the evaluations. Of two sides, side (number & 1) is black.
  Game(const Rules& rules, const Search* searches, int sides, const Board<N>& start, uint64_t seed, int number)
      : rules_(rules), number_(number), black_(sides == 2 ? number & 1 : 0) {
    Random random(mixed(seed) ^ mixed(static_cast<uint64_t>(number) + 77));
    // A tree has pointers into itself: its searcher must not be moved.
    players_.reserve(sides);
    for (int k = 0; k < sides; ++k) {
      searches_.push_back(searches[k]);
      players_.emplace_back(rules, searches[k], random.bits());
      players_[k].reset(start);
    }
    // One draw for a game: both sides of a match may resign or neither.
    double low = std::fabs(searches[0].min_resign_threshold), high = std::fabs(searches[0].max_resign_threshold);
    threshold_ = static_cast<float>(-(low + (high - low) * random.uniform()));
    allowed_ = random.uniform() >= searches[0].disable_resign_pct;
  }

  bool over() const { return over_; }

  int side_to_move() const {
    if (players_.size() == 1) return 0;
    return players_[0].root()->board.to_play == kBlack ? black_ : 1 - black_;
  }

  const Searcher<N>& player() const { return players_[side_to_move()]; }

  // Choose leaves, or play moves for which everything was in the cache, until there are leaves to evaluate.
  void select(int side, int quota, Cache* cache) {
    while (!over_ && side_to_move() == side) {
      Searcher<N>& player = players_[side];
      if (player.queued() == 0) player.select(quota, cache);
      if (!player.ready()) return;
      play();
    }
  }

  void incorporate(int side, const float* policy, const float* value, Cache* cache) {
    players_[side].incorporate(policy, value, cache);
    if (players_[side].ready()) play();
  }

  Summary summary() const {
    return {number_, static_cast<int32_t>(moves_.size()), outcome_, margin_, resigned_, allowed_, black_};
  }
  const std::vector<int16_t>& moves() const { return moves_; }
  const std::vector<uint16_t>& visits() const { return visits_; }
  const std::vector<float>& values() const { return values_; }

 private:
  // Play the move that the search found.
  void play() {
    int side = side_to_move();
    Searcher<N>& player = players_[side];
    const Search& search = searches_[side];
    const Board<N>& board = player.root()->board;
    bool black = board.to_play == kBlack;
    if (allowed_ && player.value_to_play() < threshold_) {
      resigned_ = true;
      finish(black ? -1.0f : 1.0f, 0);
      return;
    }
    bool restricted = passes_[black ? 1 : 0] >= search.restrict_pass_alive_play_threshold;
    int move = player.choose(restricted);
    moves_.push_back(static_cast<int16_t>(move));
    values_.push_back(player.root()->mean());
    visits_.resize(visits_.size() + M);
    // A match is not trained on, and its trees stay as they are (MctsPlayer::PlayMove).
    if (!player.fast() && search.target_pruning && players_.size() == 1) player.prune(restricted);
    if (!player.fast()) player.target(visits_.data() + visits_.size() - M);
    int& passes = passes_[black ? 0 : 1];
    if (passes < search.restrict_pass_alive_play_threshold) passes = move == PASS ? passes + 1 : 0;
    for (auto& each : players_) each.advance(move);
    end_or_continue(search);
  }

  void end_or_continue(const Search& search) {
    const Board<N>& board = players_[0].root()->board;
    int limit = search.move_limit > 0 ? search.move_limit : 2 * N * N;
    // Before so many moves no board can be settled (kMinPassAliveMoves of the reference).
    bool late = board.played >= N * ((N + 2) / 3);
    if (board.over() || board.played >= limit || (rules_.pass_alive && late && settled(board))) {
      margin_ = static_cast<float>(area(board, rules_.pass_alive != 0)) - rules_.komi;
      finish(margin_ > 0 ? 1.0f : margin_ < 0 ? -1.0f : 0.0f, margin_);
      return;
    }
    players_[side_to_move()].begin();
  }

  void finish(float outcome, float margin) {
    outcome_ = outcome;
    margin_ = margin;
    over_ = true;
  }

  Rules rules_;
  std::vector<Search> searches_;
  std::vector<Searcher<N>> players_;
  int number_, black_;
  float threshold_ = -1;
  bool allowed_ = false, resigned_ = false, over_ = false;
  float outcome_ = 0, margin_ = 0;
  // Passes of black and of white in a row; they stay once the threshold is reached, as in the reference.
  int passes_[2] = {0, 0};
  std::vector<int16_t> moves_;
  std::vector<uint16_t> visits_;
  std::vector<float> values_;
};

}  // namespace minigo
