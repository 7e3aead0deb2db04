"""Hyperparameters of the Transformer in PyTorch: one flat, frozen dataclass; standard library only.

The host loads this file to check a configuration, the training code to use it. Defaults are the common values of
NVIDIA's v0.6 and v0.7 submissions (run_training.sh; transformer_wmt_en_de_big_t2t of fairseq/models/transformer.py).
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Mismatch, above_zero, at_least, reject_if, too_few


@dataclass(frozen=True)
class Config:
    # All parameters of train.py except its folders.

    # Run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights, dropout and batch order; new for every experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # MLPerf round, which determines the log format
    quality_target: float = 25.0  # BLEU (0 to 100) at which the run stops
    epochs: int = 30  # maximum number of epochs
    stop_at_target: bool = True  # false: train all epochs; the best one counts

    # Network (Vaswani et al. 2017, arXiv 1706.03762, Transformer-big)
    layers: int = 6  # encoder layers, and as many decoder layers
    width: int = 1024  # hidden size
    heads: int = 16  # attention heads
    inner_width: int = 4096  # intermediate size of the MLP
    norm: Literal["pre", "post"] = "pre"  # layer norm before each block and at the end, or after each residual
    attention_bias: bool = False  # biases of the attention projections; MLPs always have biases
    vocabulary_multiple: int = 8  # pad the vocabulary to a multiple; padding is never predicted
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and Adam stay in fp32

    # Regularization and loss
    dropout: float = 0.1  # dropout rate of embeddings and block outputs
    attention_dropout: float = 0.1  # dropout rate of attention weights
    relu_dropout: float = 0.1  # dropout rate of MLP activations
    label_smoothing: float = 0.1  # label smoothing (0 to 1)
    loss_scale: float = 128.0  # initial loss scale for fp16, halved by an overflow
    loss_scale_window: int = 2000  # steps without an overflow until the loss scale is doubled
    loss_chunk: int = 0  # positions per chunk of logits; 0: the fastest number for the device

    # Input
    batch_size: int = 10240  # tokens per rank and step, with padding: sentences times the longest source or target
    max_length: int = 64  # maximum tokens per sentence with EOS; longer pairs are skipped
    length_multiple: int = 2  # pad batch lengths to a multiple of this
    packed: bool = True  # remove padding outside attention, in batches with at least 10 % padding
    prefetch: int = 4  # batches prefetched by a thread

    # Optimizer
    optimizer: Literal["adam"] = "adam"  # Kingma and Ba 2015
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: the fastest, measured before step 1
    split_optimizer: bool = False  # each rank updates a shard of the weights, which is then all-gathered
    bucket_mb: int = 25  # megabytes of gradients per all-reduce, overlapped with the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # dtype of the all-reduce
    learning_rate: float = 1.976e-3  # after the warm-up; then proportional to step ** -0.5
    warmup_steps: int = 1000  # linear from 0
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.98  # decay of the second moment
    epsilon: float = 1e-9  # added to the root of the second moment
    gradient_clip: float = 0.0  # maximum gradient norm; 0: none

    # Evaluation
    beam: int = 4  # hypotheses per sentence
    length_penalty: float = 0.6  # exponent of the length penalty (arXiv 1609.08144, equation 14)
    length_constant: float = 5.0  # its constant; 0: divide by the length itself, as in v0.5
    longest_factor: float = 1.0  # maximum translation length: longest_factor * source tokens
    longest_offset: int = 50  # + longest_offset
    eval_batch_size: int = 128  # sentences per rank
    bleu: Literal["submitted", "plain"] = "submitted"  # tokenization of the round's reference, or split at white space

    # Execution
    kernels: Literal["auto", "plain", "triton", "apex"] = "auto"  # of loss and norms; auto: the fastest, measured
    attention: Literal["auto", "flash", "fused", "plain"] = "auto"  # auto: the faster of flash (packed, GPU) and fused
    compile: bool = False  # torch.compile with dynamic shapes; GPU only
    warm_up_steps: int = 3  # steps on synthetic data before run_start
    log_interval: int = 100  # steps per record of metrics.jsonl, and between checks for signals
    checkpoint_interval: int = 0  # epochs between checkpoints; 0: only on a signal

    @property
    def targets(self) -> Dict[str, float]:
        # Target of each quality, by the names of benchmark.toml.
        return {"bleu": self.quality_target}

    @property
    def supports_flash(self) -> bool:
        # Whether flash attention on packed rows is an option.
        return self.device == "gpu" and self.packed and self.precision in ("fp16", "bf16")

    def __post_init__(self) -> None:
        at_least(self, 1, "layers", "width", "heads", "inner_width", "vocabulary_multiple", "batch_size")
        at_least(self, 1, "max_length", "length_multiple", "warmup_steps", "beam", "eval_batch_size", "epochs")
        at_least(self, 1, "log_interval", "loss_scale_window", "longest_offset")
        at_least(self, 0, "loss_chunk", "prefetch", "warm_up_steps", "checkpoint_interval", "gradient_clip")
        at_least(self, 0, "bucket_mb", "length_penalty", "length_constant", "longest_factor")
        above_zero(self, "quality_target", "learning_rate", "epsilon", "loss_scale")
        reject_if(
            ("device=cpu has no tf32: set precision=fp32", self.device == "cpu" and self.precision == "tf32"),
            (
                "device=cpu has no apex: set optimizer_kernel=auto",
                self.device == "cpu" and self.optimizer_kernel == "apex",
            ),
            ("device=cpu does not support compile: set compile=false", self.device == "cpu" and self.compile),
            (
                "attention=flash requires device=gpu, packed=true and precision=fp16 or bf16: set attention=auto",
                self.attention == "flash" and not self.supports_flash,
            ),
            (
                f"width={self.width} must be a multiple of 2 * heads={2 * self.heads}",
                self.width % (2 * self.heads) != 0,
            ),
            (
                f"batch_size={self.batch_size} must hold a pair of max_length={self.max_length}",
                self.batch_size < self.max_length,
            ),
            ("quality_target is BLEU in 0..100", self.quality_target > 100),
            ("beta1 and beta2 must be in 0..1", not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)),
            *(
                (f"{name} must be at least 0 and below 1", not 0 <= getattr(self, name) < 1)
                for name in ("dropout", "attention_dropout", "relu_dropout", "label_smoothing")
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Mismatch]:
        """Return why the ranks cannot train on a data set: each takes a batch of at least one pair."""
        return too_few(manifest, "pairs", ranks)
