/* Block of the Fisher-Yates shuffle of numpy.random.RandomState.shuffle; see shuffle.py. */
#include <stdint.h>

enum { AHEAD = 64 }; /* prefetch distance: the positions are random, and the array is larger than the caches */

/* Swap values[last], values[last - 1], ... with the positions drawn by rejection from `draws`, which is overwritten.
   `mask` must be the same for all of them. Returns the next `last`. */
uint32_t shuffle(uint32_t *values, uint32_t last, uint32_t mask, uint32_t *draws, uint32_t count) {
  uint32_t accepted = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint32_t draw = draws[i] & mask;
    draws[accepted] = draw;
    accepted += draw <= last - accepted; /* no branch: it would be mispredicted */
  }
  for (uint32_t i = 0; i < accepted; i++) {
    if (i + AHEAD < accepted)
      __builtin_prefetch(values + draws[i + AHEAD], 1);
    uint32_t value = values[last - i];
    values[last - i] = values[draws[i]];
    values[draws[i]] = value;
  }
  return last - accepted;
}
