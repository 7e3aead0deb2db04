// Area scoring, and Benson's unconditional life.
#pragma once

#include <bitset>

#include "board.h"

namespace minigo {

template <int N>
struct Life {
  using Points = std::bitset<N * N>;
  Points of[3];  // of[kBlack]: black's pass-alive stones and the regions that they enclose

  explicit Life(const Board<N>& board) {
    find(board, kBlack);
    find(board, kWhite);
  }

 private:
  static constexpr int P = N * N;
  struct Chain {
    Points stones, liberties;
    bool alive = true;
  };
  struct Region {
    Points points, empty, border;
    bool alive = true;
  };

  // D. Benson, "Life in the game of Go", 1976; of the regions only those whose empty points are all liberties count,
  // as CalculatePassAliveRegionsForColor of the v0.7 reference has it.
  void find(const Board<N>& board, int own) {
    std::vector<Chain> chains = chains_of(board, own);
    std::vector<Region> regions = regions_of(board, own);
    for (bool changed = true; changed;) {
      changed = false;
      for (Chain& chain : chains) {
        if (!chain.alive) continue;
        int eyes = 0;
        for (const Region& region : regions) {
          eyes += region.alive && (region.border & chain.stones).any() && (region.empty & ~chain.liberties).none();
        }
        if (eyes >= 2) continue;
        chain.alive = false;
        changed = true;
        for (Region& region : regions) region.alive &= (region.border & chain.stones).none();
      }
    }
    for (const Chain& chain : chains) {
      if (chain.alive) of[own] |= chain.stones;
    }
    for (const Region& region : regions) {
      if (region.alive) of[own] |= region.points;
    }
  }

  static std::vector<Chain> chains_of(const Board<N>& board, int own) {
    const auto& t = Board<N>::tables();
    std::vector<Chain> chains;
    for (int c = 0; c < P; ++c) {
      if (board.color[c] != own || board.head[c] != c) continue;
      Chain chain;
      int x = c;
      do {
        chain.stones.set(x);
        for (int i = 0; i < t.neighbors[x]; ++i) {
          if (board.color[t.neighbor[x][i]] == kEmpty) chain.liberties.set(t.neighbor[x][i]);
        }
        x = board.next[x];
      } while (x != c);
      chains.push_back(chain);
    }
    return chains;
  }

  // Regions whose empty points are all next to the side's stones; others cannot be vital to a chain.
  static std::vector<Region> regions_of(const Board<N>& board, int own) {
    const auto& t = Board<N>::tables();
    std::vector<Region> regions;
    Points visited;
    int stack[P];
    for (int start = 0; start < P; ++start) {
      if (board.color[start] == own || visited[start]) continue;
      Region region;
      int depth = 0;
      bool small = true;
      visited.set(start);
      stack[depth++] = start;
      while (depth > 0) {
        int c = stack[--depth];
        region.points.set(c);
        bool liberty = board.color[c] != kEmpty;
        if (!liberty) region.empty.set(c);
        for (int i = 0; i < t.neighbors[c]; ++i) {
          int d = t.neighbor[c][i];
          if (board.color[d] == own) {
            region.border.set(d);
            liberty = true;
          } else if (!visited[d]) {
            visited.set(d);
            stack[depth++] = d;
          }
        }
        small &= liberty;
      }
      if (small) regions.push_back(region);
    }
    return regions;
  }
};

// Black's area minus white's: stones, and empty regions that touch one colour alone (Tromp-Taylor). With pass_alive,
// what a side holds by unconditional life is its own, stones of the other side in it too (v0.7 reference).
template <int N>
int area(const Board<N>& board, bool pass_alive) {
  constexpr int P = N * N;
  const auto& t = Board<N>::tables();
  int8_t owner[P];
  std::memcpy(owner, board.color, P);
  if (pass_alive) {
    Life<N> life(board);
    for (int c = 0; c < P; ++c) {
      if (life.of[kBlack][c]) owner[c] = kBlack;
      if (life.of[kWhite][c]) owner[c] = kWhite;
    }
  }
  int total = 0, stack[P];
  bool visited[P] = {};
  for (int start = 0; start < P; ++start) {
    if (owner[start] != kEmpty) {
      total += owner[start] == kBlack ? 1 : -1;
      continue;
    }
    if (visited[start]) continue;
    int depth = 0, points = 0, found = 0;
    visited[start] = true;
    stack[depth++] = start;
    while (depth > 0) {
      int c = stack[--depth];
      ++points;
      for (int i = 0; i < t.neighbors[c]; ++i) {
        int d = t.neighbor[c][i];
        if (owner[d] != kEmpty) {
          found |= owner[d];
        } else if (!visited[d]) {
          visited[d] = true;
          stack[depth++] = d;
        }
      }
    }
    total += found == kBlack ? points : found == kWhite ? -points : 0;
  }
  return total;
}

// Every point is held by unconditional life or has a stone: passing is all that is left to do.
template <int N>
bool settled(const Board<N>& board) {
  Life<N> life(board);
  for (int c = 0; c < N * N; ++c) {
    if (board.color[c] == kEmpty && !life.of[kBlack][c] && !life.of[kWhite][c]) return false;
  }
  return true;
}

}  // namespace minigo
