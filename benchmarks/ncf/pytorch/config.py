"""Hyperparameters of NCF in PyTorch: one flat, frozen dataclass; standard library only.

The defaults are what NVIDIA's v0.5 submissions have in common (the command lines in their logs), and ours where
those say nothing. "Epoch" is one pass over the training pairs with fresh negatives, "step" one update.
"""

from dataclasses import dataclass
from typing import Dict, Literal, Tuple

from benchmarks.common.config_checks import above_zero, at_least, fraction, precision_on_cpu, refuse


@dataclass(frozen=True)
class Config:
    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # draws weights, negatives and order; a new one for each experiment
    round: Literal["v0.5"] = "v0.5"  # of MLPerf, in whose dialect the log is
    quality_target: float = 0.635  # HR@10, as a share of 1, at which the run stops
    epochs: int = 20  # at most
    stop_at_target: bool = True  # false trains all epochs and takes the best of them

    # The network (He et al. 2017, section 3.3)
    factors: int = 64  # width of the embeddings of the matrix factorisation
    layers: Tuple[int, ...] = (256, 256, 128, 64)  # the MLP: both its embeddings concatenated, then each layer
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and Adam stay in fp32
    loss_scale: float = 8192.0  # factor on the loss so that fp16 gradients do not underflow
    tables: Literal["fp32", "16-bit"] = "fp32"  # what a step looks up; 16-bit: copies for such a precision
    first_layer: Literal["auto", "tables", "rows"] = "auto"  # tables: multiply each user and item once a step

    # The optimizer
    batch_size: int = 131072  # pairs per rank and step, negatives included
    optimizer: Literal["adam"] = "adam"  # Kingma and Ba 2015, over all rows of all tables
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: measured before the first step
    learning_rate: float = 0.0045  # constant
    beta1: float = 0.25  # decay of the first moment
    beta2: float = 0.5  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment
    negatives: int = 4  # items drawn per training pair and epoch that the user does not train on

    # Evaluation
    eval_batch_size: int = 1048576  # users times candidates scored at once, per rank

    # How it runs
    kernels: Literal["auto", "plain", "triton"] = "auto"  # of the draws; auto: measured before the first step
    cuda_graph: bool = True  # replay each epoch as one graph on a GPU
    log_interval: int = 100  # steps per record in the metrics stream, and between looks for a signal
    checkpoint_interval: int = 0  # epochs between checkpoints; 0 keeps none but on a signal

    @property
    def targets(self) -> Dict[str, float]:
        """Target of each quality, by the names of benchmark.toml."""
        return {"hit_rate": self.quality_target}

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 1, "factors", "batch_size", "eval_batch_size", "negatives", "epochs", "log_interval")
        at_least(self, 0, "checkpoint_interval")
        above_zero(self, "learning_rate", "epsilon", "loss_scale")
        fraction(self, "quality_target")
        refuse(
            (
                "device=cpu has no apex: set optimizer_kernel=auto",
                self.device == "cpu" and self.optimizer_kernel == "apex",
            ),
            ("layers needs at least two values, all at least 1", len(self.layers) < 2 or min(self.layers) < 1),
            ("the first of layers must be even: two embeddings share it", self.layers[0] % 2 == 1),
            ("beta1 and beta2 must be in 0..1", not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)),
        )
