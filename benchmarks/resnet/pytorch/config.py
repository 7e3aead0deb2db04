"""Configuration of ResNet in PyTorch: the common hyperparameters and what PyTorch adds; standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.resnet.config import Hyperparameters, refuse


@dataclass(frozen=True)
class Config(Hyperparameters):
    """Everything that train.py needs to know, besides where the data and the results lie."""

    bucket_mb: int = 25  # megabytes of gradients that DistributedDataParallel sums in one all-reduce
    compile: Literal["none", "default", "max-autotune-no-cudagraphs"] = "none"  # mode of torch.compile
    cuda_graph: bool = False  # replay forward and backward as one graph, which costs the CPU no launches

    def __post_init__(self) -> None:
        """Refuse what cannot work; ValueError says which keys contradict each other."""
        super().__post_init__()
        on_cpu = self.device == "cpu"
        refuse(
            (
                f"device=cpu cannot run precision={self.precision}: set precision=fp32 or bf16",
                on_cpu and self.precision in ("fp16", "tf32"),
            ),
            ("cuda_graph needs device=gpu", on_cpu and self.cuda_graph),
            ("bucket_mb must be at least 1", self.bucket_mb < 1),
        )
