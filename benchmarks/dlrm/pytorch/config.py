"""Hyperparameters of DLRM in PyTorch: one flat, frozen dataclass; standard library only.

The host side loads this file to check a configuration before a run, the training code to run it. Values come from
``systems/*.toml`` and the command line; the defaults are from NVIDIA's v0.7 submissions (flags in their logs), or
defined here. "Epoch": a pass over the training rows; "step": an update of the weights.
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

MEMORY_SHARE = 0.9  # fraction of memory for tables; MLPs, activations and batches use the rest


@dataclass(frozen=True)
class Config:
    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights and row order; new for every experiment
    round: Literal["v0.7"] = "v0.7"  # MLPerf round, which determines the log format
    quality_target: float = 0.8025  # AUC at which the run stops
    epochs: int = 1  # maximum number of epochs

    # The network (arXiv 1906.00091); the last width of bottom_mlp is the width of the tables
    bottom_mlp: Tuple[int, ...] = (512, 256, 128)  # widths of the layers over the 13 numbers
    top_mlp: Tuple[int, ...] = (1024, 1024, 512, 256, 1)  # widths of the layers over the interaction
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and tables stay fp32

    # The loss
    loss_scale: float = 1024.0  # for fp16: factor on the loss, against underflow of gradients

    # The optimizer
    batch_size: int = 6912  # rows per rank and step
    optimizer: Literal["sgd"] = "sgd"  # without momentum, for tables and MLPs
    learning_rate: float = 24.0  # base value, after warm-up, for the global batch
    end_learning_rate: float = 0.0  # least value of the decay
    warmup_steps: int = 2750  # linear from 0
    decay_start_step: int = 49315  # first step of the decay
    decay_steps: int = 27772  # length of the decay; 0 means none
    decay_power: float = 2.0  # of the polynomial
    weight_decay: float = 0.0  # L2 penalty on the weights of the MLPs; the tables have none
    table_learning_rate_factor: float = 1.0  # learning rate of the tables relative to the MLPs

    # How it is computed
    kernels: Literal["auto", "plain", "triton"] = "auto"  # auto: measured before the first step, plain on CPUs
    fused_relu: bool = False  # bias and ReLU of the MLPs in the GEMM epilogue (cuBLASLt) on a GPU
    cuda_graph: bool = True  # on a GPU: capture a step and replay it
    warm_up_steps: int = 3  # on synthetic data, before the clock: chooses kernels, opens connections; 0 does none

    # The input
    shuffle: Literal["blocks", "rows"] = "blocks"  # order of 1,024-row blocks, or of rows held on the device
    prefetch: int = 2  # groups of steps (8 MB) read ahead, one thread per group; 0 reads in the loop
    cache_eval_data: bool = True  # keep the evaluation rows on the device after the first pass

    # Evaluation
    eval_interval: int = 3792  # steps between evaluations
    eval_batch_size: int = 16384  # rows per rank

    # Reports
    log_interval: int = 100  # steps per record in the metrics stream
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0: only on a signal

    @property
    def communicates(self) -> str:
        """Lowest precision on the wire: the vectors of the tables go to the other ranks as they are computed with."""
        return self.precision

    @property
    def targets(self) -> Dict[str, float]:
        """Targets by the names in benchmark.toml."""
        return {"auc": self.quality_target}

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 1, "batch_size", "eval_batch_size", "epochs", "eval_interval", "log_interval")
        at_least(self, 0, "prefetch", "warm_up_steps", "warmup_steps", "decay_steps")
        above_zero(self, "learning_rate", "loss_scale")
        fraction(self, "quality_target")
        reject_if(
            ("device=cpu has no CUDA graphs: set cuda_graph=false", self.device == "cpu" and self.cuda_graph),
            ("bottom_mlp needs at least one layer", not self.bottom_mlp),
            ("top_mlp must end in 1", not self.top_mlp or self.top_mlp[-1] != 1),
            ("widths of layers must be at least 1", min((*self.bottom_mlp, *self.top_mlp, 1)) < 1),
            (
                f"decay_start_step={self.decay_start_step} must not come before warmup_steps={self.warmup_steps}",
                self.decay_steps > 0 and self.decay_start_step < self.warmup_steps,
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Mismatch]:
        """Return why tables do not fit into ``memory`` bytes per rank; placement.py searches for a placement."""
        sizes, row_bytes, limit = manifest["facts"]["table_sizes"], self.bottom_mlp[-1] * 4, memory * MEMORY_SHARE
        least = max(max(sizes), -(-sum(sizes) // ranks)) * row_bytes
        if least <= limit:
            return []
        hint = "use more ranks" if max(sizes) * row_bytes <= limit else "prepare with a lower --index-limit"
        problem = f"the embedding tables need {least / 1e9:,.1f} GB on a rank, however they are placed"
        expected = f"at most {limit / 1e9:,.1f} GB, nine tenths of its memory"
        return [(problem, expected, f"{hint}, or set a narrower bottom_mlp")]
