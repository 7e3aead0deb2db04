"""The checks of `encore selftest` for BERT on SQuAD in PyTorch; see benchmarks/common/checks/selftest.py."""

from benchmarks.bert_squad import noise
from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite

ROUNDED = Tolerance(0.005, 0.02)
SUITE = Suite(
    module="benchmarks.bert_squad.pytorch",
    device=ROUNDED,
    two_ranks=Tolerance(0.005, 0.02),
    resume=Tolerance(1e-3, 1e-3),  # a GPU adds in any order
    varied={
        "precision": Tolerance(0.02, 0.05),
        "attention": ROUNDED,
        "optimizer_kernel": ROUNDED,
        "compile": ROUNDED,
        "cuda_graph": ROUNDED,
    },
    left_out=("optimizer_kernel=apex", "attention=flash", "attention=varlen"),
    # At the small system's rate the losses approach 0, so rounding errors are relatively large.
    settings={"stop_at_target": False, "initializer_range": 0.05, "learning_rate": 0.0003},
    real_sizes=noise.write,
)
