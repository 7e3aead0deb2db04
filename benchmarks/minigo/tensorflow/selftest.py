"""Configuration of `encore selftest` for Minigo in TensorFlow; see benchmarks/common/checks/selftest.py."""

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite

# Different rounding leads to different games: only the magnitude of losses is compared
OTHER_GAMES = Tolerance(0.2, 0.2)
SUITE = Suite(
    module="benchmarks.minigo.tensorflow",
    device=OTHER_GAMES,
    two_ranks=OTHER_GAMES,
    resume=OTHER_GAMES,
    settings={"xla": False, "games": 64, "eval_games": 8, "eval_first_model": False},
    steps=2,  # a record is for one generation
    varied={"precision": OTHER_GAMES, "xla": OTHER_GAMES},
    shares_gpu="NCCL requires one GPU per rank, and Horovod has no other transport for GPU tensors",
)
