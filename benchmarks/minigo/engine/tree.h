// The search tree: PUCT, virtual loss and the bookkeeping of cc/mcts_tree.cc (v0.7 reference).
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>

#include "planes.h"
#include "options.h"
#include "score.h"

namespace minigo {

template <int N>
struct Node {
  static constexpr int M = Board<N>::M, PADDED = (M + 7) / 8 * 8;
  // Of the moves: visits, sum of values (black's side) and prior.
  alignas(32) int32_t visits_of[PADDED];
  alignas(32) float total_of[PADDED];
  alignas(32) float prior_of[PADDED];
  uint8_t legal[PADDED];
  Node* child[M];
  Board<N> board;
  Node* parent;
  int32_t* visits;  // this node's own, in its parent or in the tree
  float* total;
  int16_t move;
  bool expanded;
  int waiting;  // evaluations under way

  float mean() const { return *total / static_cast<float>(1 + *visits); }
};

template <int N>
class Tree {
 public:
  using Point = Node<N>;
  static constexpr int P = N * N, PASS = P, M = P + 1, PADDED = Point::PADDED;

  Tree(const Rules& rules, const Search& search) : rules_(rules), search_(search) { reset(Board<N>()); }

  void reset(const Board<N>& board) {
    trail_.clear();
    stones_.clear();
    free_.clear();
    for (auto& chunk : chunks_) give_chunk(chunk.get());
    root_ = take(nullptr, -1);
    root_->board = board;
    root_->visits = &root_visits_;
    root_->total = &root_total_;
    root_visits_ = 0;
    root_total_ = 0;
    find_legal(root_);
  }

  Point* root() { return root_; }
  const Point* root() const { return root_; }

  // The leaf to evaluate next; a node that was never evaluated, or the end of a game.
  Point* select(bool allow_pass) {
    Point* node = root_;
    while (node->expanded) node = child_of(node, best(node, allow_pass));
    return node;
  }

  Point* child_of(Point* node, int move) {
    if (node->child[move] == nullptr) {
      Point* child = take(node, move);
      child->board = node->board;
      child->board.play(move);
      child->visits = &node->visits_of[move];
      child->total = &node->total_of[move];
      if (!child->board.over()) find_legal(child);
      node->child[move] = child;
    }
    return node->child[move];
  }

  // Keep what was searched below the move and forget the rest.
  void advance(int move, bool keep) {
    Point* next = child_of(root_, move);
    trail_.push_back(root_->board.past());
    stones_.push_back(root_->board);
    if (stones_.size() > kHistory) stones_.erase(stones_.begin());
    root_visits_ = *next->visits;
    root_total_ = *next->total;
    root_->child[move] = nullptr;
    discard(root_);
    root_ = next;
    root_->parent = nullptr;
    root_->visits = &root_visits_;
    root_->total = &root_total_;
    if (!keep) clear();
    if (root_->board.over()) find_legal(root_);
  }

  // Forget everything below the root, and its evaluation.
  void clear() {
    for (int c = 0; c < M; ++c) {
      if (root_->child[c] != nullptr) discard(root_->child[c]);
    }
    empty(root_);
    root_visits_ = 0;
    root_total_ = 0;
  }

  // A loss for whoever chose the nodes on the way to the leaf; 1 adds it and -1 takes it back.
  void virtual_loss(Point* leaf, float times) {
    for (Point* node = leaf; node != nullptr; node = node->parent) {
      *node->total += node->board.to_play == kBlack ? times : -times;
    }
  }

  void back_up(Point* leaf, float value) {
    for (Point* node = leaf; node != nullptr; node = node->parent) {
      *node->total += value;
      ++*node->visits;
    }
  }

  // Take the evaluation of a leaf: a policy over all moves and the value from black's side.
  void expand(Point* leaf, const float* policy, float value) {
    if (leaf->expanded) return;
    float sum = 0;
    for (int c = 0; c < M; ++c) sum += leaf->legal[c] ? policy[c] : 0;
    float scale = sum > 1e-30f ? 1 / sum : 0;
    float penalty = leaf->board.to_play == kBlack ? search_.value_init_penalty : -search_.value_init_penalty;
    float first = std::min(1.0f, std::max(-1.0f, value - penalty));
    for (int c = 0; c < M; ++c) {
      leaf->prior_of[c] = leaf->legal[c] ? scale * policy[c] : 0;
      leaf->total_of[c] += first;
    }
    leaf->expanded = true;
    back_up(leaf, value);
  }

  // Mix noise, already drawn for all moves, into the root's priors of the legal ones.
  void mix_noise(const float* noise, float mix) {
    float sum = 0;
    for (int c = 0; c < M; ++c) sum += root_->legal[c] ? noise[c] : 0;
    float scale = sum > 1e-30f ? 1 / sum : 0;
    for (int c = 0; c < M; ++c) {
      float part = root_->legal[c] ? scale * noise[c] : 0;
      root_->prior_of[c] = (1 - mix) * root_->prior_of[c] + mix * part;
    }
  }

  // The reference doubles the exploration term because its values are in [-1, 1].
  float exploration(const Point* node) const {
    float visits = static_cast<float>(*node->visits);
    return 2 * (std::log((1 + visits + search_.c_puct_base) / search_.c_puct_base) + search_.c_puct_init);
  }

  float score_of(const Point* node, int c, float common) const {
    float share = 1 / static_cast<float>(1 + node->visits_of[c]);
    float own = node->board.to_play == kBlack ? 1.0f : -1.0f;
    return (own * node->total_of[c] + common * node->prior_of[c]) * share - (node->legal[c] ? 0.0f : 1000.0f);
  }

  History history(const Point* leaf) const {
    History found;
    for (const Point* node = leaf; node != nullptr && found.count < kHistory; node = node->parent) {
      found.stones[found.count++] = node->board.color;
    }
    for (auto past = stones_.rbegin(); past != stones_.rend() && found.count < kHistory; ++past) {
      found.stones[found.count++] = past->color;
    }
    return found;
  }

  float final_value(const Board<N>& board) const {
    float score = static_cast<float>(area(board, rules_.pass_alive != 0)) - rules_.komi;
    return score > 0 ? 1.0f : score < 0 ? -1.0f : 0.0f;
  }

 private:
  static constexpr size_t kChunk = 32;

  int best(const Point* node, bool allow_pass) const {
    float own = node->board.to_play == kBlack ? 1.0f : -1.0f;
    float common = exploration(node) * std::sqrt(std::max(1.0f, static_cast<float>(*node->visits - 1)));
    alignas(32) float scores[PADDED];
    for (int c = 0; c < PADDED; ++c) {
      float share = 1 / static_cast<float>(1 + node->visits_of[c]);
      float forbidden = static_cast<float>(1 - node->legal[c]);
      scores[c] = (own * node->total_of[c] + common * node->prior_of[c]) * share - 1000 * forbidden;
    }
    if (!allow_pass) scores[PASS] = -100000;
    // Eight lanes, so that the compiler compares them at once; the lowest move wins a tie.
    float most[8];
    for (int k = 0; k < 8; ++k) most[k] = scores[k];
    for (int c = 8; c < PADDED; c += 8) {
      for (int k = 0; k < 8; ++k) most[k] = scores[c + k] > most[k] ? scores[c + k] : most[k];
    }
    float highest = *std::max_element(most, most + 8);
    int move = 0;
    while (move < M && scores[move] != highest) ++move;
    return move < M && node->legal[move] ? move : PASS;
  }

  void find_legal(Point* node) {
    size_t length = trail_.size();
    if (rules_.superko && node->board.captured_any) {
      for (Point* each = node; each != nullptr; each = each->parent) trail_.push_back(each->board.past());
    }
    node->board.legal(node->legal, trail_, rules_.superko != 0);
    trail_.resize(length);
  }

  Point* take(Point* parent, int move) {
    if (free_.empty()) {
      chunks_.push_back(std::make_unique<Point[]>(kChunk));
      give_chunk(chunks_.back().get());
    }
    Point* node = free_.back();
    free_.pop_back();
    empty(node);
    std::memset(node->legal, 0, sizeof node->legal);
    node->parent = parent;
    node->move = static_cast<int16_t>(move);
    node->waiting = 0;
    return node;
  }

  void give_chunk(Point* chunk) {
    for (size_t i = kChunk; i > 0; --i) free_.push_back(chunk + i - 1);
  }

  static void empty(Point* node) {
    std::memset(node->visits_of, 0, sizeof node->visits_of);
    std::memset(node->total_of, 0, sizeof node->total_of);
    std::memset(node->prior_of, 0, sizeof node->prior_of);
    std::memset(node->child, 0, sizeof node->child);
    node->expanded = false;
  }

  void discard(Point* node) {
    size_t first = free_.size();
    free_.push_back(node);
    // The nodes on the free list since the start are the queue of this walk.
    for (size_t i = first; i < free_.size(); ++i) {
      Point* each = free_[i];
      if (!each->expanded && each != node) continue;
      for (int c = 0; c < M; ++c) {
        if (each->child[c] != nullptr) free_.push_back(each->child[c]);
      }
    }
  }

  Rules rules_;
  Search search_;
  Point* root_ = nullptr;
  int32_t root_visits_ = 0;
  float root_total_ = 0;
  std::vector<Past> trail_;        // every position before the root
  std::vector<Board<N>> stones_;   // the last eight of them
  std::vector<std::unique_ptr<Point[]>> chunks_;
  std::vector<Point*> free_;
};

}  // namespace minigo
