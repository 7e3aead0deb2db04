"""Configuration of Minigo in TensorFlow; standard library only.

Values come from ``systems/*.toml`` and the command line; the defaults are from NVIDIA's submission of v0.7
(minigo/ml_perf/flags/19, run_and_time.sh). A generation is self-play with a model, training on the games of the last
generations, and a new model; it is an epoch in the log.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal, Tuple

from benchmarks.common.config_checks import (
    Manifest,
    Mismatch,
    above_zero,
    at_least,
    fraction,
    precision_on_cpu,
    reject_if,
)


@dataclass(frozen=True)
class Config:
    """Everything that train.py needs to know, except where the data and the results are."""

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights, games and position order; new for every experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # MLPerf round: log format and evaluation mode
    quality_target: float = 0.5  # win rate against the target model; v0.5: predicted moves
    epochs: int = 54  # generations; submitted: iterations minus those of the checkpoint
    train_ranks: int = 0  # number of training ranks (the first); 0: all; submitted: num_gpus_train
    selfplay_ranks: int = 0  # number of self-play ranks (the last); 0: all
    initial_weights: str = ""  # model file or MLPerf's model.ckpt-N.index, with its step; empty: random

    # The game
    board_size: Literal[5, 9, 13, 19] = 19  # lines of the board
    komi: float = 7.5  # points that white gets
    pass_alive: bool = True  # unconditional life owns enclosed points, in score and end of game; since v0.7
    features: Literal["agz", "mlperf07"] = "mlperf07"  # input planes: 17 of 8 positions, 13 of 4 and liberties
    move_limit: int = 0  # moves after which a game is counted; 0: the engine's, 2 N^2

    # Self-play
    games: int = 8192  # per generation, over all ranks; submitted: min_games_per_iteration
    concurrent_games: int = 384  # per rank, in parallel; submitted: games per thread x threads x processes
    selfplay_threads: int = 6  # search threads per rank
    inference_batch: int = 256  # batch size of the network; submitted: trt_max_batch_size
    readouts: int = 800  # per search; submitted: num_readouts
    parallel_leaves: int = 4  # evaluated together in a search, by virtual loss; submitted: virtual_losses
    fastplay_frequency: float = 0.75  # fraction of moves with fewer readouts, not used for training
    fastplay_readouts: int = 80  # readouts of these moves
    value_init_penalty: float = 0.2  # subtracted from the value of an unvisited move
    policy_softmax_temp: float = 0.98  # exponent of visits for sampled moves
    dirichlet_alpha: float = 0.03  # of the noise on the root's policy
    noise_mix: float = 0.3  # fraction of this noise
    target_pruning: bool = True  # remove visits caused only by noise from the training policy
    min_resign_threshold: float = -1.0  # the resignation threshold of a game is random between these two
    max_resign_threshold: float = -0.9  # -1: no resignation
    disable_resign_pct: float = 0.0  # fraction of games without resignation
    cache_mb: int = 8192  # memory for cached evaluations per rank; submitted: cache_size_mb

    # The network
    conv_width: int = 64  # channels of the trunk
    trunk_layers: int = 6  # residual blocks
    fc_width: int = 64  # units of the value head's hidden layer
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of products; weights and statistics stay fp32
    inference_precision: Literal["same", "fp16", "bf16", "tf32", "fp32"] = "same"  # of the network that plays
    xla: Literal["auto", True, False] = "auto"  # compile forward, backward and update; auto: with device=gpu

    # Training
    window: int = 5  # generations of games used for training; submitted: window_size
    sample_share: float = 0.3  # of the window's positions, per generation; submitted: train_filter, filter_amount
    batch_size: int = 1024  # positions per training rank and step
    optimizer: Literal["sgd"] = "sgd"  # with momentum
    learning_rate: float = 0.16  # base value
    rate_factors: Tuple[float, ...] = (0.1, 1.0, 0.1, 0.01)  # on it, one more than there are boundaries
    rate_boundaries: Tuple[int, ...] = (128, 10000, 20000)  # total steps after which the factor changes
    momentum: float = 0.9  # sgd_momentum
    l2_strength: float = 1e-4  # on half the squared weights, except biases and betas
    value_cost_weight: float = 0.5  # on the squared error of the value
    loss_scale: float = 1.0  # factor on the loss for fp16 gradients
    supervised_steps: int = 0  # on the data set's games before the first generation
    warm_up_steps: int = 3  # on synthetic data, before the clock; 0 does none

    # Evaluation
    gating_win_rate: float = 0.0  # minimum win rate of a new model against the current one; 0: none
    gating_games: int = 100  # of it
    eval_games: int = 256  # against the target model, over all ranks; submitted: num_eval_games
    eval_readouts: int = 100  # of a search in these games; submitted: num_eval_readouts
    eval_soft_moves: int = 0  # first moves sampled by visits in these games; 0: the most visited move
    eval_resign_threshold: float = -1.0  # value for resignation in these games; -1: none
    eval_first_model: bool = False  # also play the last model against the first generation
    eval_batch_size: int = 1024  # moves per rank and pass, v0.5

    # Reports
    log_interval: int = 1  # generations per record in the metrics stream
    checkpoint_interval: int = 1  # generations between checkpoints

    @property
    def targets(self) -> Dict[str, float]:
        return {"win_rate": self.quality_target}

    @property
    def compiles(self) -> bool:
        """Whether XLA compiles the code between collectives; on a CPU it is slower than TensorFlow's kernels."""
        return self.device == "gpu" if self.xla == "auto" else self.xla

    @property
    def rates(self) -> Tuple[float, ...]:
        return tuple(float(f"{self.learning_rate * factor:.6g}") for factor in self.rate_factors)

    def __post_init__(self) -> None:
        at_least(self, 1, "epochs", "games", "concurrent_games", "selfplay_threads", "readouts")
        at_least(self, 1, "inference_batch", "parallel_leaves", "conv_width", "trunk_layers", "fc_width", "window")
        at_least(self, 1, "batch_size", "fastplay_readouts", "eval_games", "eval_readouts", "gating_games")
        at_least(self, 1, "log_interval", "eval_batch_size")
        at_least(self, 0, "train_ranks", "selfplay_ranks", "cache_mb", "eval_soft_moves")
        at_least(self, 0, "supervised_steps", "warm_up_steps", "move_limit", "gating_win_rate", "l2_strength")
        above_zero(self, "learning_rate", "loss_scale")
        fraction(self, "quality_target", "sample_share")
        precision_on_cpu(self, "fp32", "bf16")
        reject_if(
            (
                "device=cpu plays in fp32 or bf16: set inference_precision=same",
                self.device == "cpu" and self.inference_precision not in ("same", "fp32", "bf16"),
            ),
            (
                "rate_factors needs one value more than rate_boundaries",
                len(self.rate_factors) != len(self.rate_boundaries) + 1,
            ),
            ("rate_boundaries must rise", sorted(set(self.rate_boundaries)) != list(self.rate_boundaries)),
            (
                f"inference_batch={self.inference_batch} must not be below parallel_leaves={self.parallel_leaves}",
                self.inference_batch < self.parallel_leaves,
            ),
            ("fastplay_frequency must be in 0..1, and below 1", not 0 <= self.fastplay_frequency < 1),
            ("noise_mix must be in 0..1", not 0 <= self.noise_mix <= 1),
            ("disable_resign_pct must be in 0..1", not 0 <= self.disable_resign_pct <= 1),
            ("eval_resign_threshold must be in -1..0", not -1 <= self.eval_resign_threshold <= 0),
            (
                "resign thresholds must be in -1..0, min_resign_threshold first",
                not -1 <= self.min_resign_threshold <= self.max_resign_threshold <= 0,
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Mismatch]:
        size, board = manifest["facts"]["board_size"], f"{self.board_size} x {self.board_size}"
        if size == self.board_size:
            return []
        return [(f"games on {size} x {size}", board, "pass another data set with --data, or set board_size")]
