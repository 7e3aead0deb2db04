/* Loops over gigabytes in random order, which in NumPy wait for memory; see compiled.py. */
#include <stdint.h>
#include <stdlib.h>

enum {
  AHEAD = 64,         /* prefetch distance */
  BLOCK = 1 << 14,    /* draws at a time */
  BUCKET_BITS = 20,   /* 4 MB of values, which fit in the cache */
  KEYS = 624, M = 397 /* of MT19937 */
};

/* A swap of values[position] with values[target]. */
typedef struct {
  uint32_t position, target, value;
} Swap;

/* Swaps of a position with a target below `low`. Such a position is final and is not read again, so the swaps can be
   executed later, sorted by bucket of targets. In a bucket they keep their order. */
typedef struct {
  uint32_t low, buckets, capacity; /* swaps per bucket */
  uint32_t span, slots;            /* positions from one flush to the next, and length of `swaps` */
  Swap *swaps;
  uint32_t *counts, *written; /* per bucket */
} Deferred;

static Swap *swaps_of(const Deferred *deferred, uint32_t bucket) {
  return deferred->swaps + (uint64_t)bucket * deferred->capacity;
}

/* Execute the deferred swaps; `last` is the next position, and `first` the highest of the last flush. */
static void flush(uint32_t *values, uint32_t last, uint32_t first, Deferred *deferred) {
  for (uint32_t bucket = 0; bucket < deferred->buckets; bucket++) {
    Swap *swaps = swaps_of(deferred, bucket);
    uint32_t count = deferred->counts[bucket];
    for (uint32_t i = 0; i < count; i++) {
      __builtin_prefetch(values + swaps[i + AHEAD < count ? i + AHEAD : i].target, 1);
      uint32_t value = values[swaps[i].target];
      values[swaps[i].target] = swaps[i].value;
      swaps[i].value = value;
    }
    deferred->written[bucket] = 0;
  }
  /* The positions of a bucket's swaps descend, so that windows of positions are written without another sort. */
  for (int64_t window = first >> BUCKET_BITS; window >= last >> BUCKET_BITS; window--)
    for (uint32_t bucket = 0; bucket < deferred->buckets; bucket++) {
      const Swap *swaps = swaps_of(deferred, bucket);
      uint32_t i = deferred->written[bucket], count = deferred->counts[bucket];
      for (; i < count && swaps[i].position >> BUCKET_BITS == window; i++)
        values[swaps[i].position] = swaps[i].value;
      deferred->written[bucket] = i;
    }
  deferred->low = last < deferred->span ? 0 : last + 1 - deferred->span;
  deferred->buckets = deferred->low ? ((deferred->low - 1) >> BUCKET_BITS) + 1 : 0;
  deferred->capacity = deferred->buckets ? deferred->slots / deferred->buckets : 0;
  for (uint32_t bucket = 0; bucket < deferred->buckets; bucket++)
    deferred->counts[bucket] = 0;
}

static uint32_t next_draw(uint32_t *key, uint32_t *used) {
  if (*used == KEYS) {
    for (uint32_t i = 0; i < KEYS; i++) {
      uint32_t y = (key[i] & 0x80000000u) | (key[i + 1 < KEYS ? i + 1 : 0] & 0x7fffffffu);
      key[i] = key[i < KEYS - M ? i + M : i + M - KEYS] ^ (y >> 1) ^ (-(y & 1) & 0x9908b0dfu);
    }
    *used = 0;
  }
  uint32_t y = key[(*used)++];
  y ^= y >> 11;
  y ^= (y << 7) & 0x9d2c5680u;
  y ^= (y << 15) & 0xefc60000u;
  return y ^ (y >> 18);
}

/* Fisher-Yates shuffle of numpy.random.RandomState.shuffle with the generator state `key` and `used`, which is updated.
   Swaps are deferred from `span` values, at least one bucket, if there is memory for them. */
void shuffle(uint32_t *values, uint32_t size, uint32_t *key, uint32_t *used, uint32_t span) {
  uint32_t draws[BLOCK];
  Deferred deferred = {.span = span, .slots = span + span / 16};
  uint32_t buckets = (size >> BUCKET_BITS) + 1, first = size - 1;
  if (size > span && (deferred.swaps = malloc(deferred.slots * sizeof(Swap)))) {
    deferred.counts = malloc(2 * buckets * sizeof(uint32_t));
    if (deferred.counts) {
      deferred.written = deferred.counts + buckets;
      flush(values, first, first, &deferred);
    }
  }
  for (uint32_t last = first; last > 0;) {
    uint32_t mask = 0xffffffffu >> __builtin_clz(last);
    /* Down to the next power of two the mask stays the same, and all draws are used. */
    uint32_t count = last - (mask >> 1), accepted = 0;
    count = count < BLOCK ? count : BLOCK;
    for (uint32_t i = 0; i < count; i++) {
      uint32_t draw = next_draw(key, used) & mask;
      draws[accepted] = draw;
      accepted += draw <= last - accepted; /* no branch: it would be mispredicted */
    }
    for (uint32_t i = 0; i < accepted; i++, last--) {
      uint32_t target = draws[i], ahead = draws[i + AHEAD < accepted ? i + AHEAD : i];
      uint32_t bucket = target >> BUCKET_BITS;
      if (last < deferred.low || (target < deferred.low && deferred.counts[bucket] == deferred.capacity)) {
        flush(values, last, first, &deferred);
        first = last;
      }
      __builtin_prefetch(values + (ahead < deferred.low ? deferred.low : ahead), 1);
      uint32_t value = values[last];
      if (target < deferred.low) {
        Swap *swap = swaps_of(&deferred, bucket) + deferred.counts[bucket]++;
        __builtin_prefetch((char *)swap + 192, 1);
        *swap = (Swap){last, target, value};
      } else {
        values[last] = values[target];
        values[target] = value;
      }
    }
  }
  free(deferred.swaps);
  free(deferred.counts);
}

/* Write the index in `documents` and the token offset of the first token of each of `count` sequences. */
void cut(const int32_t *lengths, const int32_t *documents, int32_t *indices, int32_t *offsets, uint64_t size,
         int64_t length, uint64_t count) {
  int64_t first = 0, start = 0;
  uint64_t sequence = 0;
  for (uint64_t i = 0; i < size; i++) {
    __builtin_prefetch(lengths + documents[i + AHEAD < size ? i + AHEAD : i]);
    int64_t end = first + lengths[documents[i]];
    for (; start < end && sequence < count; sequence++, start += length) {
      indices[sequence] = (int32_t)i;
      offsets[sequence] = (int32_t)(start - first);
    }
    first = end;
  }
}
