/* Loops over gigabytes in random order, which in NumPy wait for memory; see compiled.py. */
#include <stdint.h>

enum {
  AHEAD = 64,       /* prefetch distance */
  BUCKET_BITS = 19, /* 2 MB of values, which stay in the caches */
  BUCKETS = 1 << (32 - BUCKET_BITS),
  KEYS = 624, /* of MT19937 */
  M = 397
};

/* A swap of values[position] with values[target]. */
typedef struct {
  uint32_t position, target, value;
} Swap;

/* Swaps with targets in lower buckets than that of their position. Such a position is final and is not read again, so
   the swaps can be executed later, bucket by bucket of targets, in their order. */
typedef struct {
  Swap *swaps;
  uint32_t slots, capacity; /* swaps of all buckets, and per bucket */
  uint32_t buckets;
  uint32_t counts[BUCKETS], executed[BUCKETS];
} Deferred;

static Swap *swaps_of(const Deferred *deferred, uint32_t bucket) {
  return deferred->swaps + (uint64_t)bucket * deferred->capacity;
}

/* Execute the swaps of a bucket: the value of the position stays in `swaps`. */
static void execute(uint32_t *values, uint32_t bucket, Deferred *deferred) {
  Swap *swaps = swaps_of(deferred, bucket);
  uint32_t count = deferred->counts[bucket];
  for (uint32_t i = deferred->executed[bucket]; i < count; i++) {
    __builtin_prefetch(values + swaps[i + AHEAD < count ? i + AHEAD : i].target, 1);
    uint32_t value = values[swaps[i].target];
    values[swaps[i].target] = swaps[i].value;
    swaps[i].value = value;
  }
  deferred->executed[bucket] = count;
}

/* Execute all swaps and write the values of their positions, from `first` down to above `last`. */
static void flush(uint32_t *values, uint32_t last, uint32_t first, Deferred *deferred) {
  uint32_t written[BUCKETS] = {0};
  for (uint32_t bucket = 0; bucket < deferred->buckets; bucket++)
    execute(values, bucket, deferred);
  /* The positions of a bucket's swaps descend, so that windows of positions are written without another sort. */
  for (int64_t window = first >> BUCKET_BITS; window >= last >> BUCKET_BITS; window--)
    for (uint32_t bucket = 0; bucket < deferred->buckets; bucket++) {
      const Swap *swaps = swaps_of(deferred, bucket);
      uint32_t i = written[bucket], count = deferred->counts[bucket];
      for (; i < count && swaps[i].position >> BUCKET_BITS == window; i++)
        values[swaps[i].position] = swaps[i].value;
      written[bucket] = i;
    }
  deferred->buckets = last >> BUCKET_BITS;
  deferred->capacity = deferred->buckets ? deferred->slots / deferred->buckets : 0;
  for (uint32_t bucket = 0; bucket < deferred->buckets; bucket++)
    deferred->counts[bucket] = deferred->executed[bucket] = 0;
}

static uint32_t twisted(uint32_t key, uint32_t next, uint32_t other) {
  uint32_t y = (key & 0x80000000u) | (next & 0x7fffffffu);
  return other ^ (y >> 1) ^ (-(y & 1) & 0x9908b0dfu);
}

/* Two loops without a modulo, which compilers vectorize. */
static void next_keys(uint32_t *key) {
  for (uint32_t i = 0; i < KEYS - M; i++)
    key[i] = twisted(key[i], key[i + 1], key[i + M]);
  for (uint32_t i = KEYS - M; i < KEYS - 1; i++)
    key[i] = twisted(key[i], key[i + 1], key[i + M - KEYS]);
  key[KEYS - 1] = twisted(key[KEYS - 1], key[0], key[M - 1]);
}

/* Write the accepted ones of at most `count` draws for `last`, `last` - 1, ... and return their number. */
static uint32_t draw(uint32_t *draws, uint32_t count, uint32_t last, uint32_t mask, uint32_t *key, uint32_t *used) {
  if (*used == KEYS) {
    next_keys(key);
    *used = 0;
  }
  count = count < KEYS - *used ? count : KEYS - *used;
  for (uint32_t i = 0; i < count; i++) {
    uint32_t y = key[*used + i];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    draws[i] = (y ^ (y >> 18)) & mask;
  }
  *used += count;
  uint32_t accepted = 0;
  for (uint32_t i = 0; i < count; i++) {
    uint32_t target = draws[i];
    draws[accepted] = target;
    accepted += target <= last - accepted; /* no branch: it would be mispredicted */
  }
  return accepted;
}

/* Fisher-Yates shuffle of numpy.random.RandomState.shuffle with the generator state `key` and `used`, which is updated.
   `swaps` has memory for `slots` swaps, at least one per bucket. */
void shuffle(uint32_t *values, uint32_t size, uint32_t *key, uint32_t *used, Swap *swaps, uint32_t slots) {
  uint32_t draws[KEYS], first = size - 1, last = first, bucket = first >> BUCKET_BITS;
  Deferred deferred = {.swaps = swaps, .slots = slots};
  flush(values, last, first, &deferred);
  while (last > 0) {
    if (bucket > last >> BUCKET_BITS)
      execute(values, --bucket, &deferred);
    uint32_t low = bucket << BUCKET_BITS, mask = 0xffffffffu >> __builtin_clz(last);
    /* Down to the next power of two the mask stays the same, and all draws are used. */
    uint32_t same_mask = last - (mask >> 1), same_bucket = last - low + 1;
    uint32_t accepted = draw(draws, same_mask < same_bucket ? same_mask : same_bucket, last, mask, key, used);
    for (uint32_t i = 0; i < accepted; i++, last--) {
      uint32_t target = draws[i], value = values[last];
      if (target >= low) {
        values[last] = values[target];
        values[target] = value;
        continue;
      }
      uint32_t target_bucket = target >> BUCKET_BITS;
      if (deferred.counts[target_bucket] == deferred.capacity) {
        flush(values, last, first, &deferred);
        first = last;
      }
      Swap *swap = swaps_of(&deferred, target_bucket) + deferred.counts[target_bucket]++;
      __builtin_prefetch((char *)swap + 192, 1);
      *swap = (Swap){last, target, value};
    }
  }
  flush(values, last, first, &deferred);
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
