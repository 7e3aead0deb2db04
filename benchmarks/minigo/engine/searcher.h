// One side's search: which leaves to evaluate, noise, and the choice of a move (SelfplayGame in
// cc/concurrent_selfplay.cc of the v0.7 reference).
#pragma once

#include "cache.h"
#include "tree.h"

namespace minigo {

template <int N>
class Searcher {
 public:
  using Point = Node<N>;
  static constexpr int P = N * N, PASS = P, M = P + 1;

  Searcher(const Rules& rules, const Search& search, uint64_t seed)
      : rules_(rules), search_(search), tree_(rules, search), random_(seed), mix_(random_.bits()) {
    begin();
  }

  const Point* root() const { return tree_.root(); }
  Tree<N>& tree() { return tree_; }
  Random& random() { return random_; }
  bool fast() const { return fast_; }
  size_t queued() const { return queue_.size(); }

  void reset(const Board<N>& board) {
    tree_.reset(board);
    begin();
  }

  // Start the search of a move: readouts are added to the visits that the root has. The reference sets the target before
  // it clears the tree, so that a full search after fast ones makes up for the visits that it forgets.
  void begin() {
    fast_ = search_.fastplay_frequency > 0 && root()->board.played > 0 &&
            random_.uniform() < search_.fastplay_frequency;
    noise_ = !fast_ && search_.noise_mix > 0;
    if (!search_.reuse_tree) tree_.clear();
    target_ = *root()->visits + (fast_ ? search_.fastplay_readouts : search_.readouts);
    if (search_.fastplay_frequency > 0 && !fast_) tree_.clear();
  }

  bool ready() const { return queue_.empty() && root()->expanded && *root()->visits >= target_; }

  // Put at most `quota` leaves on the queue; none if the search is complete.
  void select(int quota, Cache* cache) {
    Point* root = tree_.root();
    while (static_cast<int>(queue_.size() + again_.size()) < quota && (!root->expanded || *root->visits < target_)) {
      if (noise_ && root->expanded) add_noise();
      Point* leaf = tree_.select(search_.allow_pass != 0);
      if (leaf->board.over()) {
        tree_.back_up(leaf, tree_.final_value(leaf->board));
        continue;
      }
      if (leaf->waiting > 0) {
        // Chosen again before its evaluation is there: it takes a place of the quota, as in the reference, which
        // evaluates it twice and ignores the second value.
        again_.push_back(leaf);
        tree_.virtual_loss(leaf, 1);
        if (leaf == root) break;
        continue;
      }
      CacheKey<N> key;
      if (cache->enabled()) {
        key = CacheKey<N>(leaf->board, leaf->legal);
        if (recall(leaf, key, cache)) continue;
      }
      queue_.push_back({leaf, symmetry_of(leaf), key});
      leaf->waiting = 1;
      tree_.virtual_loss(leaf, 1);
    }
  }

  template <typename T>
  void write(T* out) const {
    size_t size = static_cast<size_t>(P) * planes_of(rules_.features);
    for (const Leaf& each : queue_) {
      write_planes(each.node->board, each.node->legal, tree_.history(each.node), rules_.features, each.symmetry, out);
      out += size;
    }
  }

  // Take the evaluations of the queue, in its order; values are of the side to move.
  void incorporate(const float* policy, const float* value, Cache* cache) {
    const auto& t = Tables<N>::get();
    for (Point* leaf : again_) tree_.virtual_loss(leaf, -1);
    again_.clear();
    float real[Point::PADDED] = {};
    for (const Leaf& each : queue_) {
      tree_.virtual_loss(each.node, -1);
      each.node->waiting = 0;
      for (int c = 0; c < M; ++c) real[c] = policy[t.symmetry[each.symmetry][c]];
      float black = each.node->board.to_play == kBlack ? *value : -*value;
      tree_.expand(each.node, real, black);
      if (cache->enabled()) keep(real, black, each.key, cache);
      policy += M;
      ++value;
    }
    queue_.clear();
  }

  // The move to play. Before soft_pick_cutoff it is drawn in proportion to the visits to the power
  // policy_softmax_temp, and never a pass; after it the most visited one. Without readouts the policy takes the
  // place of the visits.
  int choose(bool restrict_pass_alive) {
    if (root()->board.played < search_.soft_pick_cutoff) return drawn();
    return most_visited(restrict_pass_alive);
  }

  int most_visited(bool restrict_pass_alive) const {
    const Point* node = root();
    std::bitset<P> outside = restrict_pass_alive ? held(node->board) : std::bitset<P>();
    float common = tree_.exploration(node) * std::sqrt(1 + static_cast<float>(*node->visits));
    int best = -1;
    float best_score = 0;
    for (int c = 0; c < M; ++c) {
      if (!node->legal[c] || (c != PASS && outside[c])) continue;
      float score = search_.readouts == 0 ? node->prior_of[c] : tree_.score_of(node, c, common);
      int more = best < 0 || search_.readouts == 0 ? 0 : node->edges->visits_of[c] - node->edges->visits_of[best];
      if (best < 0 || more > 0 || (more == 0 && score > best_score)) best = c, best_score = score;
    }
    return best;
  }

  // Take visits away that the search would not have spent, had it known the values that it found, in the tree itself:
  // the next search begins with what is left (MctsTree::ReshapeFinalVisits, v0.7).
  void prune(bool restrict_pass_alive) {
    Point* node = tree_.root();
    int32_t* counts = node->edges->visits_of;
    int best = most_visited(false);
    float visits = static_cast<float>(*node->visits), own = node->board.to_play == kBlack ? 1.0f : -1.0f;
    float best_score = tree_.score_of(node, best, tree_.exploration(node) * std::sqrt(1 + visits));
    std::bitset<P> outside = restrict_pass_alive ? held(node->board) : std::bitset<P>();
    bool any = false;
    for (int c = 0; c < M; ++c) {
      if (c != PASS && outside[c]) {
        counts[c] = 0;
      } else if (c != best) {
        float mean = own * node->edges->total_of[c] / static_cast<float>(1 + counts[c]);
        double enough = tree_.exploration(node) * node->prior_of[c] * std::sqrt(double{visits}) / (best_score - mean);
        // A move whose value alone is above the best score keeps no visit, as in the reference.
        counts[c] = best_score > mean ? static_cast<int32_t>(std::min<double>(counts[c], enough)) : 0;
      }
      any |= counts[c] > 0;
    }
    if (!any) counts[PASS] = 1;
  }

  // The visits as a training target.
  void target(uint16_t* out) const {
    for (int c = 0; c < M; ++c) out[c] = static_cast<uint16_t>(std::min(root()->edges->visits_of[c], 65535));
  }

  void advance(int move) { tree_.advance(move, search_.reuse_tree != 0); }

  float value_to_play() const { return root()->board.to_play == kBlack ? root()->mean() : -root()->mean(); }

  static std::bitset<P> held(const Board<N>& board) {
    Life<N> life(board);
    return life.of[kBlack] | life.of[kWhite];
  }

 private:
  struct Leaf {
    Point* node;
    int symmetry;
    CacheKey<N> key;
  };

  void add_noise() {
    float noise[M];
    for (float& each : noise) each = static_cast<float>(random_.gamma(search_.dirichlet_alpha));
    tree_.mix_noise(noise, search_.noise_mix);
    noise_ = false;
  }

  // A function of the position and the game, so that it does not depend on the order of evaluations.
  int symmetry_of(const Point* leaf) const {
    if (!search_.random_symmetry) return 0;
    return static_cast<int>(mixed(leaf->board.hash[0] ^ mix_) % kSymmetries);
  }

  bool recall(Point* leaf, const CacheKey<N>& key, Cache* cache) {
    const auto& t = Tables<N>::get();
    float kept[M + 1], real[Point::PADDED] = {};
    if (!cache->find(key.key, kept)) return false;
    for (int c = 0; c < M; ++c) real[c] = kept[t.symmetry[key.symmetry][c]];
    tree_.expand(leaf, real, kept[M]);
    return true;
  }

  void keep(const float* real, float black, const CacheKey<N>& key, Cache* cache) {
    const auto& t = Tables<N>::get();
    float kept[M + 1];
    for (int c = 0; c < M; ++c) kept[t.symmetry[key.symmetry][c]] = real[c];
    kept[M] = black;
    cache->keep(key.key, kept);
  }

  int drawn() {
    const Point* node = root();
    double sums[P], sum = 0;
    for (int c = 0; c < P; ++c) {
      double weight = search_.readouts == 0 ? node->prior_of[c] : node->edges->visits_of[c];
      if (weight > 0 && node->legal[c]) sum += std::pow(weight, search_.policy_softmax_temp);
      sums[c] = sum;
    }
    if (sum == 0) return PASS;
    double x = random_.uniform() * sum;
    int c = 0;
    while (c < P - 1 && sums[c] <= x) ++c;
    return c;
  }

  Rules rules_;
  Search search_;
  Tree<N> tree_;
  Random random_;
  uint64_t mix_;
  int target_ = 0;
  bool noise_ = false, fast_ = false;
  std::vector<Leaf> queue_;
  std::vector<Point*> again_;
};

}  // namespace minigo
