"""Hyperparameters of BERT pretraining in PyTorch: one flat, frozen dataclass; standard library only.

The host loads this file to check a configuration, the training code to use it. Defaults are the common values of
NVIDIA's v0.7 submissions (run.sub, run_pretraining.py, bert_config.json of BERT-Large). A sample is a pair of texts. A
run counts samples and has one epoch, as submitted.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Mismatch, above_zero, at_least, fraction, reject_if, too_few

Attention = Literal["auto", "flash", "varlen", "grouped", "padded"]


@dataclass(frozen=True)
class Config:
    # All parameters of train.py except its folders.

    # Run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights, dropout and sample order; new for every experiment
    round: Literal["v0.7"] = "v0.7"  # MLPerf round, which determines the log format
    quality_target: float = 0.712  # masked LM accuracy (0 to 1) at which the run stops
    epochs: int = 1  # always 1; max_samples and max_steps set the length
    max_steps: int = 13700  # step at which the learning rate reaches 0
    max_samples: int = 4500000  # maximum number of training samples

    # Network (Devlin et al. 2018, arXiv 1810.04805, BERT-Large)
    checkpoint: str = ""  # initial weights: path, or file name in the data folder; empty: random
    layers: int = 24  # Transformer layers
    width: int = 1024  # hidden size
    heads: int = 16  # attention heads
    inner_width: int = 4096  # intermediate size of the MLP
    positions: int = 512  # rows of the position embedding: maximum sample length
    vocabulary_multiple: int = 8  # pad the vocabulary to a multiple of this
    gelu: Literal["tanh", "erf"] = "tanh"  # tanh: the approximation of the submissions (layers/fused_gelu.py)
    dropout: float = 0.1  # dropout rate of embeddings and block outputs
    attention_dropout: float = 0.1  # dropout rate of attention weights
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of GEMMs; weights, reductions and LAMB stay in fp32

    # Loss
    masked_mean: Literal["global", "batch"] = "batch"  # mean over the masked words of the global or the rank's batch
    loss_scale: float = 1048576.0  # initial loss scale for fp16, halved by an overflow
    loss_scale_window: int = 2000  # steps without an overflow until the loss scale is doubled

    # Input
    batch_size: int = 32  # samples per rank and step
    accumulation: int = 1  # micro-batches per step
    token_bucket: int = 512  # pad packed rows to a multiple of this many tokens, for cuda_graph and fp8
    prefetch: int = 4  # batches prefetched by threads

    # Optimizer (You et al. 2020, arXiv 1904.00962; benchmarks/common/torch/lamb.py)
    optimizer: Literal["lamb"] = "lamb"  # as in apex's FusedLAMB
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: the fastest, measured before step 1
    split_optimizer: bool = False  # each rank updates a shard of the weights (with optimizer_kernel=fused)
    bucket_mb: int = 25  # megabytes of gradients per all-reduce, overlapped with the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # dtype of the all-reduce
    learning_rate: float = 3.5e-4  # initial value of the decay, which starts at step 0 also with a warm-up
    warmup_steps: int = 0  # linear, counted from start_warmup_step
    start_warmup_step: int = 0  # step at which the warm-up starts; not positive
    decay_power: float = 1.0  # power of the polynomial decay
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-6  # added to the root of the second moment
    weight_decay: float = 0.01  # of all parameters except biases and layer norms
    attention_norm_decay: bool = False  # weight decay of attention norm scales, as submitted with fused_mha
    gradient_clip: float = 1.0  # maximum gradient norm; 0: none

    # Evaluation
    eval_start_samples: int = 3000000  # training samples before the first evaluation
    eval_interval_samples: int = 500000  # training samples between evaluations
    eval_batch_size: int = 16  # samples per rank

    # Execution
    attention: Attention = "auto"  # see benchmarks/language/pytorch/attention.py
    compile: bool = False  # torch.compile of each layer with dynamic shapes; GPU only
    cuda_graph: bool = False  # capture forward and backward of a micro-batch, one graph per row length; GPU only
    fp8: Literal["none", "scaled_mm"] = "none"  # FP8 GEMMs in the layers; see benchmarks/language/pytorch/fp8.py
    warm_up_steps: int = 3  # steps on synthetic data before run_start
    log_interval: int = 10  # steps per record of metrics.jsonl, and between checks for signals
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0: only on a signal

    @property
    def fills_rows(self) -> bool:
        return self.cuda_graph or self.fp8 != "none"

    @property
    def targets(self) -> Dict[str, float]:
        # Target of each quality, by the names of benchmark.toml.
        return {"masked_accuracy": self.quality_target}

    def __post_init__(self) -> None:
        at_least(self, 1, "max_steps", "max_samples", "layers", "width", "heads", "inner_width", "positions")
        at_least(self, 1, "vocabulary_multiple", "batch_size", "accumulation", "eval_interval_samples")
        at_least(self, 1, "eval_batch_size", "log_interval", "loss_scale_window", "token_bucket")
        at_least(self, 0, "prefetch", "warmup_steps", "eval_start_samples", "warm_up_steps", "checkpoint_interval")
        at_least(self, 0, "bucket_mb", "weight_decay", "gradient_clip", "decay_power")
        above_zero(self, "learning_rate", "epsilon", "loss_scale")
        fraction(self, "quality_target")
        on_cpu = self.device == "cpu"
        reject_if(
            ("epochs must be 1: set max_samples or max_steps to train longer", self.epochs != 1),
            ("device=cpu has no tf32: set precision=fp32", on_cpu and self.precision == "tf32"),
            ("device=cpu has no apex: set optimizer_kernel=auto", on_cpu and self.optimizer_kernel == "apex"),
            (
                f"device=cpu has no {self.attention} attention: set attention=auto",
                on_cpu and self.attention in ("flash", "varlen"),
            ),
            ("device=cpu does not support compile: set compile=false", on_cpu and self.compile),
            ("device=cpu has no CUDA graphs: set cuda_graph=false", on_cpu and self.cuda_graph),
            (
                "attention=grouped reads lengths on the host, which a CUDA graph cannot: set attention=auto or "
                "cuda_graph=false",
                self.cuda_graph and self.attention == "grouped",
            ),
            (
                "attention=varlen does not support dropout: set attention_dropout=0",
                self.attention == "varlen" and self.attention_dropout > 0,
            ),
            ("fp8 requires precision=bf16 outside the GEMMs", self.fp8 != "none" and self.precision != "bf16"),
            (
                f"inner_width={self.inner_width} must be a multiple of 16 for fp8",
                self.fp8 != "none" and self.inner_width % 16 != 0,
            ),
            (f"token_bucket={self.token_bucket} must be a multiple of 16", self.token_bucket % 16 != 0),
            (
                "split_optimizer requires optimizer_kernel=fused or auto",
                self.split_optimizer and self.optimizer_kernel not in ("auto", "fused"),
            ),
            (f"width={self.width} must be a multiple of heads={self.heads}", self.width % self.heads != 0),
            (
                f"batch_size={self.batch_size} must be a multiple of accumulation={self.accumulation}",
                self.batch_size % self.accumulation != 0,
            ),
            (f"width={self.width} must be a multiple of 64: LAMB reads 64 weights at once", self.width % 64 != 0),
            ("start_warmup_step must be 0 or below", self.start_warmup_step > 0),
            ("beta1 and beta2 must be in 0..1", not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)),
            *(
                (f"{name} must be at least 0 and below 1", not 0 <= getattr(self, name) < 1)
                for name in ("dropout", "attention_dropout")
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Mismatch]:
        mismatches = too_few(manifest, "samples", self.batch_size * ranks)
        length = manifest["facts"]["sequence_length"]
        if length > self.positions:
            hint = f"set positions={length}, or prepare the data with a shorter sequence"
            mismatches.append((f"samples of up to {length} tokens", f"at most positions={self.positions}", hint))
        return mismatches
