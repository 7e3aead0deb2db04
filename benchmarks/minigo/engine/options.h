// What crosses from Python; position.py has the same structures, field for field.
#pragma once

#include <cstdint>

namespace minigo {

struct Rules {
  int32_t size;
  float komi;
  int32_t superko;
  int32_t pass_alive;
  int32_t features;
};

struct Search {
  int32_t readouts;
  int32_t parallel_leaves;
  int32_t soft_pick_cutoff;
  int32_t reuse_tree;
  int32_t random_symmetry;
  int32_t allow_pass;
  int32_t target_pruning;
  int32_t restrict_pass_alive_play_threshold;
  int32_t fastplay_readouts;
  int32_t move_limit;
  int32_t cache_entries;
  float c_puct_init;
  float c_puct_base;
  float value_init_penalty;
  float policy_softmax_temp;
  float noise_mix;
  float dirichlet_alpha;
  float min_resign_threshold;
  float max_resign_threshold;
  float disable_resign_pct;
  float fastplay_frequency;
};

// A game that ended; the arrays are fetched by a second call.
struct Summary {
  int32_t number;
  int32_t plies;
  float outcome;
  float margin;
  int32_t resigned;
  int32_t resignation_allowed;
  int32_t black;
};

}  // namespace minigo
