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
struct Node;

// Visits, sums of values (black's side) and positions that a node's moves lead to. Most nodes are evaluated and never
// come again: only those that do have edges, so that a tree is in the processor's caches for longer.
template <int N>
struct Edges {
  static constexpr int M = Board<N>::M, PADDED = (M + 7) / 8 * 8;
  alignas(32) int32_t visits_of[PADDED];
  alignas(32) float total_of[PADDED];
  Node<N>* child[M];
};

template <int N>
struct Node {
  static constexpr int M = Board<N>::M, PADDED = (M + 7) / 8 * 8;
  // What every visit reads is first.
  Edges<N>* edges;
  Node* parent;
  int32_t* visits;  // this node's own, in its parent or in the tree
  float* total;
  Node* youngest;  // child, and the next older one of the same parent
  Node* older;
  float first;  // the value that each move begins with
  int waiting;  // evaluations under way
  int16_t move;
  bool expanded;
  alignas(32) float prior_of[PADDED];
  alignas(8) uint8_t legal[PADDED];
  Board<N> board;

  float mean() const { return *total / static_cast<float>(1 + *visits); }
};

// Memory of one kind, taken and given back one by one.
template <typename T>
struct Store {
  static constexpr size_t kChunk = 32;
  std::vector<std::unique_ptr<T[]>> chunks;
  std::vector<T*> free;

  T* take() {
    if (free.empty()) {
      chunks.push_back(std::unique_ptr<T[]>(new T[kChunk]));
      for (size_t i = kChunk; i > 0; --i) free.push_back(&chunks.back()[i - 1]);
    }
    T* found = free.back();
    free.pop_back();
    return found;
  }
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
    if (root_ != nullptr) discard(root_, nullptr);
    root_ = take(nullptr, -1);
    root_->board = board;
    open(root_);
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
    while (node->expanded) {
      if (node->edges == nullptr) open(node);
      node = child_of(node, best(node, allow_pass));
    }
    return node;
  }

  Point* child_of(Point* node, int move) {
    Edges<N>* edges = node->edges;
    if (edges->child[move] == nullptr) {
      Point* child = take(node, move);
      copy(node->board, &child->board);
      child->board.play(move);
      child->visits = &edges->visits_of[move];
      child->total = &edges->total_of[move];
      if (!child->board.over()) find_legal(child);
      child->older = node->youngest;
      node->youngest = child;
      edges->child[move] = child;
    }
    return edges->child[move];
  }

  // Keep what was searched below the move and forget the rest.
  void advance(int move, bool keep) {
    Point* next = child_of(root_, move);
    trail_.push_back(root_->board.past());
    stones_.push_back(root_->board);
    if (stones_.size() > kHistory) stones_.erase(stones_.begin());
    root_visits_ = *next->visits;
    root_total_ = *next->total;
    discard(root_, next);
    root_ = next;
    root_->parent = nullptr;
    root_->visits = &root_visits_;
    root_->total = &root_total_;
    if (!keep) clear();
    if (root_->edges == nullptr) open(root_);
    if (root_->board.over()) find_legal(root_);
  }

  // Forget everything below the root, and its evaluation.
  void clear() {
    for (Point* each = root_->youngest; each != nullptr; each = each->older) discard(each, nullptr);
    root_->youngest = nullptr;
    root_->expanded = false;
    open(root_);
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

  // Take the evaluation of a leaf: a policy over all moves, with zeros up to PADDED, and the value from black's side.
  void expand(Point* leaf, const float* policy, float value) {
    if (leaf->expanded) return;
    float sum = total_of_legal(leaf, policy);
    float scale = sum > 1e-30f ? 1 / sum : 0;
    for (int c = 0; c < PADDED; ++c) leaf->prior_of[c] = static_cast<float>(leaf->legal[c]) * (scale * policy[c]);
    float penalty = leaf->board.to_play == kBlack ? search_.value_init_penalty : -search_.value_init_penalty;
    leaf->first = std::min(1.0f, std::max(-1.0f, value - penalty));
    leaf->expanded = true;
    if (leaf->edges != nullptr) open(leaf);
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
    const Edges<N>* edges = node->edges;
    float share = 1 / static_cast<float>(1 + edges->visits_of[c]);
    float own = node->board.to_play == kBlack ? 1.0f : -1.0f;
    return (own * edges->total_of[c] + common * node->prior_of[c]) * share - (node->legal[c] ? 0.0f : 1000.0f);
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
  // The loss that a move has which is not legal: no search chooses it, and none reads which moves are legal.
  static constexpr float kIllegal = 1e6f;

  // In eight lanes, which the compiler adds at once.
  static float total_of_legal(const Point* node, const float* values) {
    float lanes[8] = {};
    for (int c = 0; c < PADDED; c += 8) {
      for (int k = 0; k < 8; ++k) lanes[k] += static_cast<float>(node->legal[c + k]) * values[c + k];
    }
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  }

  int best(const Point* node, bool allow_pass) const {
    const Edges<N>* edges = node->edges;
    float own = node->board.to_play == kBlack ? 1.0f : -1.0f;
    float common = exploration(node) * std::sqrt(std::max(1.0f, static_cast<float>(*node->visits - 1)));
    alignas(32) float scores[PADDED];
    for (int c = 0; c < PADDED; ++c) {
      float share = 1 / static_cast<float>(1 + edges->visits_of[c]);
      scores[c] = (own * edges->total_of[c] + common * node->prior_of[c]) * share;
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
    for (bool found = false; !found && move < PADDED; move += found ? 0 : 8) {
      for (int k = 0; k < 8; ++k) found |= scores[move + k] == highest;
    }
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

  // As GCC does not: it makes a call of one instruction (rep movs) whose start costs more than the copy.
  static void copy(const Board<N>& from, Board<N>* to) {
    constexpr size_t kBlock = 64, kRest = sizeof(Board<N>) % kBlock;
    const char* source = reinterpret_cast<const char*>(&from);
    char* target = reinterpret_cast<char*>(to);
    for (size_t i = 0; i + kBlock <= sizeof(Board<N>); i += kBlock) {
      std::memcpy(target + i, source + i, kBlock);
      asm volatile("" ::: "memory");
    }
    std::memcpy(target + sizeof(Board<N>) - kRest, source + sizeof(Board<N>) - kRest, kRest);
  }

  Point* take(Point* parent, int move) {
    Point* node = nodes_.take();
    node->edges = nullptr;
    node->parent = parent;
    node->youngest = node->older = nullptr;
    node->waiting = 0;
    node->move = static_cast<int16_t>(move);
    node->expanded = false;
    std::memset(node->legal, 0, sizeof node->legal);
    return node;
  }

  // Give a node edges without visits: all moves have the first value, and those that are not legal a loss.
  void open(Point* node) {
    if (node->edges == nullptr) node->edges = edges_.take();
    Edges<N>* edges = node->edges;
    std::memset(edges->visits_of, 0, sizeof edges->visits_of);
    std::memset(edges->child, 0, sizeof edges->child);
    float first = node->expanded ? node->first : 0.0f;
    float loss = !node->expanded ? 0.0f : node->board.to_play == kBlack ? -kIllegal : kIllegal;
    for (int c = 0; c < PADDED; ++c) edges->total_of[c] = node->legal[c] ? first : loss;
  }

  // Free a node and everything below it, but for what is kept.
  void discard(Point* node, const Point* kept) {
    std::vector<Point*>& free = nodes_.free;
    size_t first = free.size();
    free.push_back(node);
    // The nodes on the free list since the start are the queue of this walk.
    for (size_t i = first; i < free.size(); ++i) {
      if (free[i]->edges == nullptr) continue;
      edges_.free.push_back(free[i]->edges);
      for (Point* each = free[i]->youngest; each != nullptr; each = each->older) {
        if (each != kept) free.push_back(each);
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
  Store<Point> nodes_;
  Store<Edges<N>> edges_;
};

}  // namespace minigo
