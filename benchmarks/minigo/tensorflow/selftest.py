"""What `encore selftest` checks of Minigo in TensorFlow; see benchmarks/common/checks/selftest.py."""

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.checks.selftest import Suite

# What rounds otherwise plays other games: the losses are compared for their size alone
OTHER_GAMES = Tolerance(0.2, 0.2)
SUITE = Suite(
    module="benchmarks.minigo.tensorflow",
    device=OTHER_GAMES,
    two_ranks=OTHER_GAMES,
    resume=OTHER_GAMES,
    settings={"xla": False, "games": 64, "eval_games": 8, "eval_first_model": False},
    steps=2,  # a record is that of a generation's games and training
    varied={"precision": OTHER_GAMES, "xla": OTHER_GAMES},
    shares_gpu="NCCL takes one rank per GPU, and Horovod has no other way between GPUs",
)
