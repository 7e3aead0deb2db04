"""Configuration of Minigo in TensorFlow; standard library only.

Values come from ``systems/*.toml`` and the command line; the defaults are what NVIDIA's submission of v0.7 has
(minigo/ml_perf/flags/19, run_and_time.sh). A generation is some games by one model, training on the last generations'
games, and a new model; it is what the log calls an epoch.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal, Tuple

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, fraction, precision_on_cpu, refuse


@dataclass(frozen=True)
class Config:
    """Everything that train.py needs to know, except where the data and the results are."""

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # draws weights, games and the order of positions; a new one for each experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # of MLPerf: its log, and what is evaluated when
    quality_target: float = 0.5  # share of games won against the target model; v0.5: of moves predicted
    epochs: int = 54  # generations; submitted: iterations less what the checkpoint has
    train_ranks: int = 0  # ranks that train, the first ones; 0: all; submitted: num_gpus_train
    selfplay_ranks: int = 0  # ranks that play, the last ones; 0: all
    initial_weights: str = ""  # model file or MLPerf's model.ckpt-N.index to begin with, and its step; empty: drawn

    # The game
    board_size: Literal[5, 9, 13, 19] = 19  # lines of the board
    komi: float = 7.5  # points that white gets
    pass_alive: bool = True  # what is alive whoever moves owns what it encloses, in score and end; since v0.7
    features: Literal["agz", "mlperf07"] = "mlperf07"  # input planes: 17 of 8 positions, 13 of 4 and liberties
    move_limit: int = 0  # moves after which a game is counted; 0: the engine's, 2 N^2

    # Self-play
    games: int = 8192  # of a generation, over all ranks; submitted: min_games_per_iteration
    concurrent_games: int = 384  # that a rank plays at once; submitted: games a thread x threads x processes a GPU
    selfplay_groups: int = 1  # of these games: one is searched while another one's positions are evaluated
    selfplay_threads: int = 6  # of the search on each rank
    inference_batch: int = 256  # positions of a pass of the network; submitted: trt_max_batch_size
    readouts: int = 800  # of a search; submitted: num_readouts
    first_readouts: int = 0  # the same in the first generation; 0: readouts
    parallel_leaves: int = 4  # of a search at once, by virtual loss; submitted: virtual_losses
    fastplay_frequency: float = 0.75  # share of moves that are searched less and not trained on
    fastplay_readouts: int = 80  # of those
    value_init_penalty: float = 0.2  # subtracted from the value of a move that was not searched yet
    policy_softmax_temp: float = 0.98  # exponent on visits for the moves that are drawn
    dirichlet_alpha: float = 0.03  # of the noise on the root's policy
    noise_mix: float = 0.3  # share of that noise
    target_pruning: bool = True  # take visits that noise alone caused out of what is trained on
    min_resign_threshold: float = -1.0  # a game's threshold of resignation is drawn between these two
    max_resign_threshold: float = -0.9  # -1 never resigns
    disable_resign_pct: float = 0.0  # share of games in which nobody may resign
    cache_mb: int = 8192  # memory for evaluations that were made already, per rank; submitted: cache_size_mb

    # The network
    conv_width: int = 64  # channels of the trunk
    trunk_layers: int = 6  # residual blocks
    fc_width: int = 64  # units of the value head's hidden layer
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of products; weights and statistics stay fp32
    inference_precision: Literal["same", "fp16", "bf16", "tf32", "fp32"] = "same"  # of the network that plays
    xla: Literal["auto", True, False] = "auto"  # compile forward, backward and update; auto: with device=gpu

    # Training
    window: int = 5  # generations whose games are trained on; submitted: window_size
    sample_share: float = 0.3  # of the window's positions, in each generation; submitted: train_filter, filter_amount
    batch_size: int = 1024  # positions per training rank and step
    optimizer: Literal["sgd"] = "sgd"  # with momentum
    learning_rate: float = 0.16  # base value
    rate_factors: Tuple[float, ...] = (0.1, 1.0, 0.1, 0.01)  # on it, one more than there are boundaries
    rate_boundaries: Tuple[int, ...] = (128, 10000, 20000)  # steps, also those before, after which the next holds
    momentum: float = 0.9  # sgd_momentum
    l2_strength: float = 1e-4  # on half the squared weights, biases and betas apart
    value_cost_weight: float = 0.5  # on the squared error of the value
    loss_scale: float = 1.0  # factor on the loss before its gradients, for fp16
    supervised_steps: int = 0  # on the data set's games before the first generation
    gradient_compression: Literal["none", "fp16"] = "none"  # type in which gradients travel
    warm_up_steps: int = 3  # on synthetic data, before the clock; 0 does none

    # Evaluation
    gating_win_rate: float = 0.0  # of a new model against the present one, below which it does not play; 0: all do
    gating_games: int = 100  # of it
    eval_games: int = 256  # against the target model, over all ranks; submitted: num_eval_games
    eval_readouts: int = 100  # of a search in them; submitted: num_eval_readouts
    eval_soft_moves: int = 0  # first moves in them that are drawn by the visits; 0: the most visited move, always
    eval_resign_threshold: float = -1.0  # value below which a side gives a game of them up; -1: never
    eval_first_model: bool = False  # the last model evaluated plays as many against the first generation's
    eval_batch_size: int = 1024  # moves per rank and pass, v0.5

    # Reports
    log_interval: int = 1  # generations per record in the metrics stream
    checkpoint_interval: int = 1  # generations between checkpoints

    @property
    def targets(self) -> Dict[str, float]:
        return {"win_rate": self.quality_target}

    @property
    def compiles(self) -> bool:
        """Whether XLA compiles what runs between the collectives; on a CPU it is slower than TensorFlow's kernels."""
        return self.device == "gpu" if self.xla == "auto" else self.xla

    @property
    def rates(self) -> Tuple[float, ...]:
        return tuple(float(f"{self.learning_rate * factor:.6g}") for factor in self.rate_factors)

    def __post_init__(self) -> None:
        at_least(self, 1, "epochs", "games", "concurrent_games", "selfplay_groups", "selfplay_threads", "readouts")
        at_least(self, 1, "inference_batch", "parallel_leaves", "conv_width", "trunk_layers", "fc_width", "window")
        at_least(self, 1, "batch_size", "fastplay_readouts", "eval_games", "eval_readouts", "gating_games")
        at_least(self, 1, "log_interval", "eval_batch_size")
        at_least(self, 0, "train_ranks", "selfplay_ranks", "first_readouts", "cache_mb", "eval_soft_moves")
        at_least(self, 0, "supervised_steps", "warm_up_steps", "move_limit", "gating_win_rate", "l2_strength")
        above_zero(self, "learning_rate", "loss_scale")
        fraction(self, "quality_target", "sample_share")
        precision_on_cpu(self, "fp32", "bf16")
        refuse(
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

    def misfits(self, manifest: Manifest, ranks: int, memory: float) -> List[Misfit]:
        size, board = manifest["facts"]["board_size"], f"{self.board_size} x {self.board_size}"
        if size == self.board_size:
            return []
        return [(f"games on {size} x {size}", board, "name another data set with --data, or set board_size")]
