// The rules on one board: chains with their liberties, captures, ko, and hashes under the eight symmetries.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "generator.h"

namespace minigo {

enum Color : int8_t { kEmpty = 0, kBlack = 1, kWhite = 2 };

// Why a move is refused; the numbers are those of Python's REASONS.
enum Refusal { kLegal = 0, kOutside = 1, kOccupied = 2, kSuicide = 3, kKo = 4, kSuperko = 5 };

constexpr int kSymmetries = 8;

// What depends on the size alone. A symmetry s moves point c to symmetry[s][c].
template <int N>
struct Tables {
  static constexpr int P = N * N;
  uint16_t neighbor[P][4];
  uint8_t neighbors[P];
  uint16_t symmetry[kSymmetries][P + 1];
  uint64_t stone[3][P];
  uint64_t forbidden[P];
  uint64_t white_to_play, passed;

  static const Tables& get() {
    static const Tables tables;
    return tables;
  }

 private:
  Tables() {
    for (int c = 0; c < P; ++c) {
      int row = c / N, column = c % N;
      uint8_t k = 0;
      if (row > 0) neighbor[c][k++] = static_cast<uint16_t>(c - N);
      if (column > 0) neighbor[c][k++] = static_cast<uint16_t>(c - 1);
      if (column < N - 1) neighbor[c][k++] = static_cast<uint16_t>(c + 1);
      if (row < N - 1) neighbor[c][k++] = static_cast<uint16_t>(c + N);
      neighbors[c] = k;
      for (int s = 0; s < kSymmetries; ++s) {
        int y = s & 4 ? column : row, x = s & 4 ? row : column;
        if (s & 1) y = N - 1 - y;
        if (s & 2) x = N - 1 - x;
        symmetry[s][c] = static_cast<uint16_t>(y * N + x);
      }
      stone[kEmpty][c] = 0;
      stone[kBlack][c] = mixed(1000003ull * N + 4 * c);
      stone[kWhite][c] = mixed(1000003ull * N + 4 * c + 1);
      forbidden[c] = mixed(1000003ull * N + 4 * c + 2);
    }
    for (int s = 0; s < kSymmetries; ++s) symmetry[s][P] = P;
    white_to_play = mixed(11);
    passed = mixed(12);
  }
};

// A position of the past for superko: its hash, and its stones in one number, which rule out most comparisons.
struct Past {
  uint64_t hash;
  uint32_t stones;
};

template <int N>
struct Board {
  static constexpr int P = N * N, PASS = P, M = P + 1;
  using Index = std::conditional_t<(P < 255), uint8_t, uint16_t>;

  int8_t color[P];
  Index head[P];       // the chain's first stone
  Index next[P];       // the chain's stones in a circle
  Index liberties[P];  // of a chain, at its head
  uint64_t hash[kSymmetries];
  uint32_t stones;  // black ones, and white ones times 65536
  int32_t played;
  int16_t ko;  // the point that the ko rule forbids, or -1
  int8_t to_play;
  uint8_t passes;     // in a row
  bool captured_any;  // while nothing was captured, no position can repeat

  Board() { std::memset(this, 0, sizeof *this), to_play = kBlack, ko = -1; }

  static const Tables<N>& tables() { return Tables<N>::get(); }
  Past past() const { return {hash[0], stones}; }
  bool over() const { return passes >= 2; }
  static uint32_t one(int color) { return color == kBlack ? 1u : 65536u; }

  // Put a stone of the side to play on an empty point, which has a liberty or captures; pass with PASS.
  void play(int c) {
    ++played;
    int own = to_play;
    to_play = static_cast<int8_t>(3 - own);
    if (c == PASS) {
      ko = -1;
      ++passes;
      return;
    }
    passes = 0;
    put(c, own);
  }

  // Put a stone and remove what it captures.
  void put(int c, int own) {
    const auto& t = tables();
    Index taken[4], joined[4];
    int takes = 0, joins = 0, empty = 0, others = 0;
    Index seen[4];
    int seen_count = 0;
    for (int i = 0; i < t.neighbors[c]; ++i) {
      int d = t.neighbor[c][i];
      if (color[d] == kEmpty) {
        ++empty;
      } else if (color[d] == own) {
        add(joined, &joins, head[d]);
      } else {
        ++others;
        if (add(seen, &seen_count, head[d]) && --liberties[head[d]] == 0) taken[takes++] = head[d];
      }
    }
    attach(c, own, joined, joins, empty);
    ko = -1;
    bool surrounded = others == t.neighbors[c];
    if (takes == 1 && surrounded && next[taken[0]] == taken[0]) ko = static_cast<int16_t>(taken[0]);
    for (int i = 0; i < takes; ++i) remove(taken[i]);
    captured_any |= takes > 0;
  }

  // The rules without superko. Suicide is illegal, as cc/position.cc of the v0.7 reference has it.
  Refusal refusal(int c) const {
    if (c == PASS) return kLegal;
    if (color[c] != kEmpty) return kOccupied;
    if (c == ko) return kKo;
    const auto& t = tables();
    for (int i = 0; i < t.neighbors[c]; ++i) {
      int d = t.neighbor[c][i];
      if (color[d] == kEmpty) return kLegal;
      if ((liberties[head[d]] == 1) == (color[d] != to_play)) return kLegal;
    }
    return kSuicide;
  }

  // Whether a move, legal without superko, captures; *after becomes the position that it leads to.
  bool lookahead(int c, Past* after) const {
    const auto& t = tables();
    after->hash = hash[0] ^ t.stone[to_play][c];
    after->stones = stones + one(to_play);
    int other = 3 - to_play;
    Index seen[4];
    int count = 0;
    bool captures = false;
    for (int i = 0; i < t.neighbors[c]; ++i) {
      int d = t.neighbor[c][i];
      if (color[d] != other || liberties[head[d]] != 1 || !add(seen, &count, head[d])) continue;
      captures = true;
      int x = head[d];
      do {
        after->hash ^= t.stone[other][x];
        after->stones -= one(other);
        x = next[x];
      } while (x != head[d]);
    }
    return captures;
  }

  // Fill out[M] with 1 for legal moves. Positional superko: no move may recreate a position of the trail, whoever
  // was to play (cc/position.h and cc/mcts_tree.cc of the v0.7 reference).
  void legal(uint8_t* out, const std::vector<Past>& trail, bool superko) const {
    without_superko(out);
    out[PASS] = 1;
    if (!superko || !captured_any) return;
    uint32_t candidates = 0;
    for (const Past& past : trail) candidates += past.stones == stones + one(to_play);
    uint8_t captures[P];
    if (candidates == 0 && !find_captures(captures)) return;
    for (int c = 0; c < P; ++c) {
      if (!out[c] || (candidates == 0 && !captures[c])) continue;
      Past after;
      if (lookahead(c, &after) || candidates) out[c] = !repeats(after, trail);
    }
  }

  static bool repeats(const Past& after, const std::vector<Past>& trail) {
    for (const Past& past : trail) {
      if (past.hash == after.hash && past.stones == after.stones) return true;
    }
    return false;
  }

 private:
  // Most empty points have an empty neighbour: those are found for all points at once, in rows with a column between
  // them, and only the others are looked at one by one. (What ko forbids has none.)
  void without_superko(uint8_t* out) const {
    constexpr int W = N + 1, FIRST = W, LAST = W * (N + 1);
    uint8_t empty[W * (N + 2)] = {}, open[W * (N + 2)];
    for (int row = 0; row < N; ++row) {
      for (int x = 0; x < N; ++x) empty[FIRST + row * W + x] = color[row * N + x] == kEmpty;
    }
    for (int i = FIRST; i < LAST; ++i) {
      open[i] = empty[i] & (empty[i - 1] | empty[i + 1] | empty[i - W] | empty[i + W]);
    }
    for (int row = 0; row < N; ++row) std::memcpy(out + row * N, open + FIRST + row * W, N);
    // A few are left; eight points are passed over at once.
    uint8_t rest[(P + 7) / 8 * 8] = {};
    for (int c = 0; c < P; ++c) rest[c] = static_cast<uint8_t>((color[c] == kEmpty) & ~out[c]);
    for (int first = 0; first < P; first += 8) {
      uint64_t any;
      std::memcpy(&any, rest + first, 8);
      for (int c = first; any != 0; ++c, any >>= 8) {
        if (any & 1) out[c] = refusal(c) == kLegal;
      }
    }
  }

  // Mark the points next to chains of the other side that have one liberty; false if there are none.
  bool find_captures(uint8_t* out) const {
    const auto& t = tables();
    bool any = false;
    for (int c = 0; c < P; ++c) any |= color[c] == 3 - to_play && head[c] == c && liberties[c] == 1;
    if (!any) return false;
    std::memset(out, 0, P);
    for (int c = 0; c < P; ++c) {
      if (color[c] != 3 - to_play || liberties[head[c]] != 1) continue;
      for (int i = 0; i < t.neighbors[c]; ++i) out[t.neighbor[c][i]] = 1;
    }
    return true;
  }

  static bool add(Index* list, int* count, Index value) {
    for (int i = 0; i < *count; ++i) {
      if (list[i] == value) return false;
    }
    list[(*count)++] = value;
    return true;
  }

  void flip(int c, int which) {
    const auto& t = tables();
    for (int s = 0; s < kSymmetries; ++s) hash[s] ^= t.stone[which][t.symmetry[s][c]];
  }

  // Join the new stone to the chains next to it and count the liberties.
  void attach(int c, int own, const Index* joined, int joins, int empty) {
    color[c] = static_cast<int8_t>(own);
    flip(c, own);
    stones += one(own);
    head[c] = next[c] = static_cast<Index>(c);
    if (joins == 0) {
      liberties[c] = static_cast<Index>(empty);
      return;
    }
    Index first = joined[0];
    int count = liberties[first] - 1;
    if (joins == 1) {
      const auto& t = tables();
      for (int i = 0; i < t.neighbors[c]; ++i) {
        int d = t.neighbor[c][i];
        if (color[d] == kEmpty && !touches(d, first)) ++count;
      }
    }
    join(first, static_cast<Index>(c));
    for (int i = 1; i < joins; ++i) join(first, joined[i]);
    liberties[first] = static_cast<Index>(joins == 1 ? count : counted(first));
  }

  bool touches(int d, Index chain) const {
    const auto& t = tables();
    for (int i = 0; i < t.neighbors[d]; ++i) {
      int e = t.neighbor[d][i];
      if (color[e] != kEmpty && head[e] == chain) return true;
    }
    return false;
  }

  void join(Index first, Index other) {
    int x = other;
    do {
      head[x] = first;
      x = next[x];
    } while (x != other);
    std::swap(next[first], next[other]);
  }

  int counted(Index chain) const {
    const auto& t = tables();
    uint64_t marked[(P + 63) / 64] = {};
    int count = 0, x = chain;
    do {
      for (int i = 0; i < t.neighbors[x]; ++i) {
        int d = t.neighbor[x][i];
        uint64_t bit = 1ull << (d & 63);
        if (color[d] != kEmpty || (marked[d >> 6] & bit)) continue;
        marked[d >> 6] |= bit;
        ++count;
      }
      x = next[x];
    } while (x != chain);
    return count;
  }

  // Take a chain off the board; every chain next to a removed stone gains that liberty once.
  void remove(Index chain) {
    const auto& t = tables();
    int which = color[chain], x = chain;
    do {
      color[x] = kEmpty;
      flip(x, which);
      stones -= one(which);
      Index seen[4];
      int count = 0;
      for (int i = 0; i < t.neighbors[x]; ++i) {
        int d = t.neighbor[x][i];
        if (color[d] == 3 - which && add(seen, &count, head[d])) ++liberties[head[d]];
      }
      x = next[x];
    } while (x != chain);
  }
};

}  // namespace minigo
