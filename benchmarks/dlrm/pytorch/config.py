"""Hyperparameters of DLRM in PyTorch: one flat, frozen dataclass; standard library only.

The host side loads this file to check a configuration before anything starts, the training code to run it.
Values come from ``systems/*.toml`` and the command line; the defaults are those of NVIDIA's v0.7 submissions (the
flags that their logs print), and ours where those say nothing. "Epoch" is one pass over the training rows, "step"
one update of the weights.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal, Tuple

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, fraction, precision_on_cpu, refuse

MEMORY_SHARE = 0.9  # share of a rank's memory for its tables; the rest is for the MLPs, the activations and the batches


@dataclass(frozen=True)
class Config:
    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # draws weights and the order of the rows; a new one for each experiment
    round: Literal["v0.7"] = "v0.7"  # of MLPerf, in whose dialect the log is
    quality_target: float = 0.8025  # AUC at which the run stops
    epochs: int = 1  # at most

    # The network (arXiv 1906.00091); the last width of bottom_mlp is that of the tables
    bottom_mlp: Tuple[int, ...] = (512, 256, 128)  # widths of the layers over the 13 numbers
    top_mlp: Tuple[int, ...] = (1024, 1024, 512, 256, 1)  # widths of the layers over the interaction
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and tables stay fp32

    # The loss
    loss_scale: float = 1024.0  # for fp16: factor on the loss so that gradients do not underflow

    # The optimizer
    batch_size: int = 6912  # rows per rank and step
    optimizer: Literal["sgd"] = "sgd"  # without momentum, for tables and MLPs alike
    learning_rate: float = 24.0  # base value, after warm-up, for the global batch
    end_learning_rate: float = 0.0  # least value of the decay
    warmup_steps: int = 2750  # linear from 0
    decay_start_step: int = 49315  # step at which the decay begins
    decay_steps: int = 27772  # length of the decay; 0 means none
    decay_power: float = 2.0  # of the polynomial
    weight_decay: float = 0.0  # L2 penalty on the weights of the MLPs; the tables have none
    table_learning_rate_factor: float = 1.0  # learning rate of the tables, as a multiple of that of the MLPs

    # How it is computed
    embedding_update: Literal["scatter", "sorted"] = "scatter"  # sorted adds in a fixed order on a GPU too
    kernels: Literal["auto", "plain", "triton"] = "auto"  # auto: measured before the first step, plain on CPUs
    fused_relu: bool = False  # bias and ReLU of the MLPs inside of their GEMMs, by cuBLASLt on a GPU
    early_sums: bool = False  # between ranks: sum and exchange gradients within the backward pass, not behind it
    cuda_graph: bool = True  # on a GPU: capture a step once and replay it
    warm_up_steps: int = 3  # on synthetic data, before the clock: chooses kernels, opens connections; 0 does none

    # The input
    shuffle: Literal["blocks", "rows"] = "blocks"  # order of 1,024-row blocks, or of rows held on the device
    prefetch: int = 2  # groups of steps (8 MB) read ahead, each by a thread; 0 reads in the loop
    cache_eval_data: bool = True  # keep the evaluation rows on the device after the first pass

    # Evaluation
    eval_interval: int = 3792  # steps between evaluations
    eval_batch_size: int = 16384  # rows per rank

    # Reports
    log_interval: int = 100  # steps per record in the metrics stream
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0 keeps none but on a signal

    @property
    def communicates(self) -> str:
        """Lowest precision on the wire: the vectors of the tables go to the other ranks as they are computed with."""
        return self.precision

    @property
    def targets(self) -> Dict[str, float]:
        """Target of each quality, by the names of benchmark.toml."""
        return {"auc": self.quality_target}

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 1, "batch_size", "eval_batch_size", "epochs", "eval_interval", "log_interval")
        at_least(self, 0, "prefetch", "warm_up_steps", "warmup_steps", "decay_steps")
        above_zero(self, "learning_rate", "loss_scale")
        fraction(self, "quality_target")
        refuse(
            ("device=cpu has no CUDA graphs: set cuda_graph=false", self.device == "cpu" and self.cuda_graph),
            ("bottom_mlp needs at least one layer", not self.bottom_mlp),
            ("top_mlp must end in 1", not self.top_mlp or self.top_mlp[-1] != 1),
            ("widths of layers must be at least 1", min((*self.bottom_mlp, *self.top_mlp, 1)) < 1),
            (
                f"decay_start_step={self.decay_start_step} must not come before warmup_steps={self.warmup_steps}",
                self.decay_steps > 0 and self.decay_start_step < self.warmup_steps,
            ),
        )

    def misfits(self, manifest: Manifest, ranks: int, memory: float) -> List[Misfit]:
        """Return why tables do not fit into ``memory``, in bytes of a rank; placement.py places those that may."""
        sizes, row_bytes, limit = manifest["facts"]["table_sizes"], self.bottom_mlp[-1] * 4, memory * MEMORY_SHARE
        least = max(max(sizes), -(-sum(sizes) // ranks)) * row_bytes
        if least <= limit:
            return []
        hint = "use more ranks" if max(sizes) * row_bytes <= limit else "prepare with a lower --index-limit"
        problem = f"the embedding tables need {least / 1e9:,.1f} GB on a rank, however they are placed"
        expected = f"at most {limit / 1e9:,.1f} GB, nine tenths of its memory"
        return [(problem, expected, f"{hint}, or set a narrower bottom_mlp")]
