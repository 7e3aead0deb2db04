// The network's input: planes in the order of the reference, one position as [N, N, planes].
#pragma once

#include "board.h"

namespace minigo {

enum Features { kAgz = 0, kMlperf07 = 1 };

constexpr int kHistory = 8;

inline int planes_of(int features) { return features == kAgz ? 17 : 13; }

// The stones of the last eight positions, the newest first; fewer at the beginning of a game.
struct History {
  const int8_t* stones[kHistory];
  int count = 0;
};

template <int N>
bool would_capture(const Board<N>& board, int c) {
  const auto& t = Board<N>::tables();
  for (int i = 0; i < t.neighbors[c]; ++i) {
    int d = t.neighbor[c][i];
    if (board.color[d] == 3 - board.to_play && board.liberties[board.head[d]] == 1) return true;
  }
  return false;
}

// Four bits, each in a byte of its own and a byte of zeros after it.
struct Spread {
  uint64_t of[16];
  constexpr Spread() : of() {
    for (int bits = 0; bits < 16; ++bits) {
      for (int k = 0; k < 4; ++k) of[bits] |= static_cast<uint64_t>(bits >> k & 1) << (16 * k);
    }
  }
};
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "Spread is in the order of bytes in memory");

// The bytes of a point are written eight at a time.
template <int N, int PAIRS>
void write_stones(int own, const History& history, const uint16_t* where, int planes, uint8_t* out) {
  static constexpr Spread spread;
  uint8_t black[N * N] = {}, white[N * N] = {};
  for (int k = 0; k < PAIRS && k < history.count; ++k) {
    const uint8_t* stones = reinterpret_cast<const uint8_t*>(history.stones[k]);
    uint8_t bit = static_cast<uint8_t>(1 << k);
    for (int c = 0; c < N * N; ++c) black[c] |= static_cast<uint8_t>(-(stones[c] & 1)) & bit;
    for (int c = 0; c < N * N; ++c) white[c] |= static_cast<uint8_t>(-(stones[c] >> 1 & 1)) & bit;
  }
  const uint8_t *mine = own == kBlack ? black : white, *others = own == kBlack ? white : black;
  for (int c = 0; c < N * N; ++c) {
    uint8_t* to = out + static_cast<size_t>(where[c]) * planes;
    for (int half = 0; half < PAIRS / 4; ++half) {
      uint64_t bytes = spread.of[mine[c] >> (4 * half) & 15] | spread.of[others[c] >> (4 * half) & 15] << 8;
      std::memcpy(to + 8 * half, &bytes, 8);
    }
    to[2 * PAIRS] = own == kBlack;
  }
}

template <int N, int PAIRS, typename T>
void write_stones(int own, const History& history, const uint16_t* where, int planes, T* out) {
  static const int8_t nothing[N * N] = {};
  const int8_t* stones[PAIRS];
  for (int k = 0; k < PAIRS; ++k) stones[k] = k < history.count ? history.stones[k] : nothing;
  for (int c = 0; c < N * N; ++c) {
    T* to = out + static_cast<size_t>(where[c]) * planes;
    for (int k = 0; k < PAIRS; ++k) {
      to[2 * k] = stones[k][c] == own;
      to[2 * k + 1] = stones[k][c] == 3 - own;
    }
    to[2 * PAIRS] = own == kBlack;
  }
}

// AGZ: eight pairs (own, other) and black to play. mlperf07: four pairs, black to play, chains of one, two, more
// liberties, and legal moves that capture (AgzFeatures and Mlperf07Features in cc/model/features.h, v0.7).
template <int N, typename T>
void write_planes(const Board<N>& board, const uint8_t* legal, const History& history, int features, int symmetry,
                  T* out) {
  const uint16_t* where = Board<N>::tables().symmetry[symmetry];
  int planes = planes_of(features), own = board.to_play;
  if (features == kAgz) {
    write_stones<N, 8>(own, history, where, planes, out);
    return;
  }
  write_stones<N, 4>(own, history, where, planes, out);
  for (int c = 0; c < N * N; ++c) {
    T* to = out + static_cast<size_t>(where[c]) * planes;
    int liberties = board.color[c] == kEmpty ? 0 : board.liberties[board.head[c]];
    to[9] = liberties == 1;
    to[10] = liberties == 2;
    to[11] = liberties >= 3;
    to[12] = legal[c] && would_capture(board, c);
  }
}

}  // namespace minigo
