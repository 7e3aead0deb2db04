"""Are an image's implementations of an optimizer told apart if one is wrong?"""

from __future__ import annotations

import torch

from benchmarks.common.checks import compare_optimizers
from benchmarks.common.torch import optimizers

right = optimizers.adam_candidates(0.01, (0.9, 0.999), 1e-8, None)
wrong = {**right, "apex": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)}
assert compare_optimizers.main() == 0
print(compare_optimizers.differing(wrong, "cpu"))
