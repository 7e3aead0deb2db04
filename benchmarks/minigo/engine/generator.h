// Random numbers that are the same on every machine: the standard library's distributions are not.
#pragma once

#include <cmath>
#include <cstdint>

namespace minigo {

// SplitMix64 (Steele, Lea, Flood 2014): each state gives one number, so a seed may be any mixture of others.
inline uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(mixed(seed)) {}

  uint64_t bits() {
    state_ += 0x9e3779b97f4a7c15ull;
    return mixed(state_);
  }

  // In [0, 1).
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1.0p-53; }

  // Marsaglia's polar method.
  double normal() {
    for (;;) {
      double x = 2 * uniform() - 1, y = 2 * uniform() - 1, square = x * x + y * y;
      if (square > 0 && square < 1) return x * std::sqrt(-2 * std::log(square) / square);
    }
  }

  // Marsaglia and Tsang 2000; a shape under 1 by the power of a uniform number.
  double gamma(double shape) {
    if (shape < 1) return gamma(shape + 1) * std::pow(uniform(), 1 / shape);
    double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
    for (;;) {
      double x = normal(), v = 1 + c * x;
      if (v <= 0) continue;
      v = v * v * v;
      double u = uniform();
      if (u > 0 && std::log(u) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
    }
  }

 private:
  uint64_t state_;
};

}  // namespace minigo
