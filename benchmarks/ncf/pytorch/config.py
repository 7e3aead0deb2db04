"""Hyperparameters of NCF in PyTorch: one flat, frozen dataclass; standard library only.

The defaults are common to NVIDIA's v0.5 submissions (command lines in their logs), or defined here. "Epoch": a pass
over the training pairs with new negatives; "step": an update.
"""

from dataclasses import dataclass
from typing import Dict, Literal, Tuple

from benchmarks.common.config_checks import above_zero, at_least, fraction, precision_on_cpu, reject_if


@dataclass(frozen=True)
class Config:
    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights, negatives and order; new for every experiment
    round: Literal["v0.5"] = "v0.5"  # MLPerf round, which determines the log format
    quality_target: float = 0.635  # HR@10 (0 to 1) at which the run stops
    epochs: int = 20  # maximum number of epochs
    stop_at_target: bool = True  # false: train all epochs; the best one counts

    # The network (He et al. 2017, section 3.3)
    factors: int = 64  # width of the embeddings of the matrix factorisation
    layers: Tuple[int, ...] = (256, 256, 128, 64)  # the MLP: width of both embeddings together, then layers
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and Adam stay in fp32
    loss_scale: float = 8192.0  # factor on the loss, against underflow of fp16 gradients
    tables: Literal["fp32", "16-bit"] = "fp32"  # type of table lookups; 16-bit: copies in this precision
    first_layer: Literal["auto", "tables", "rows"] = "auto"  # tables: compute it per user and item in every step

    # The optimizer
    batch_size: int = 131072  # pairs per rank and step, negatives included
    optimizer: Literal["adam"] = "adam"  # Kingma and Ba 2015, over all rows of all tables
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: measured before the first step
    learning_rate: float = 0.0045  # constant
    beta1: float = 0.25  # decay of the first moment
    beta2: float = 0.5  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment
    negatives: int = 4  # sampled items without a training pair of the user, per pair and epoch

    # Evaluation
    eval_batch_size: int = 1048576  # users times candidates per batch and rank

    # How it runs
    kernels: Literal["auto", "plain", "triton"] = "auto"  # for sampling; auto: measured before the first step
    cuda_graph: bool = True  # replay an epoch as one graph on a GPU
    log_interval: int = 100  # steps per record in the metrics stream, and between looks for a signal
    checkpoint_interval: int = 0  # epochs between checkpoints; 0: only on a signal

    @property
    def targets(self) -> Dict[str, float]:
        """Targets by the names in benchmark.toml."""
        return {"hit_rate": self.quality_target}

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 1, "factors", "batch_size", "eval_batch_size", "negatives", "epochs", "log_interval")
        at_least(self, 0, "checkpoint_interval")
        above_zero(self, "learning_rate", "epsilon", "loss_scale")
        fraction(self, "quality_target")
        reject_if(
            (
                "device=cpu has no apex: set optimizer_kernel=auto",
                self.device == "cpu" and self.optimizer_kernel == "apex",
            ),
            ("layers needs at least two values, all at least 1", len(self.layers) < 2 or min(self.layers) < 1),
            ("the first of layers must be even: two embeddings share it", self.layers[0] % 2 == 1),
            ("beta1 and beta2 must be in 0..1", not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)),
        )
