"""Hyperparameters of GNMT in PyTorch: one flat, frozen dataclass; standard library only.

Defaults are the common values of NVIDIA's v0.6 and v0.7 submissions (train.py and run_and_time.sh).
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import (
    Manifest,
    Mismatch,
    above_zero,
    at_least,
    precision_on_cpu,
    reject_if,
    too_few,
)


@dataclass(frozen=True)
class Config:
    # All parameters of train.py except its folders.

    # Run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for initial weights, dropout and pair order; new for every experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # MLPerf round, which determines the log format
    quality_target: float = 24.0  # BLEU (0 to 100) at which the run stops
    epochs: int = 8  # maximum number of epochs
    stop_at_target: bool = True  # false: train all epochs; the best one counts

    # Network (Wu et al. 2016, arXiv 1609.08144, NVIDIA's GNMT v2)
    width: int = 1024  # size of embeddings, LSTM layers, attention and context
    layers: int = 4  # LSTM layers of the encoder (the first is bidirectional) and of the decoder
    dropout: float = 0.2  # dropout rate; see dropout_at
    dropout_at: Literal["inputs", "outputs"] = "inputs"  # inputs of each LSTM, or (v0.5) outputs of all but the last
    initial_weights: float = 0.1  # range of the uniform distribution; 0: PyTorch's defaults, as in v0.5
    vocabulary_multiple: int = 8  # pad the vocabulary to a multiple of this
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and optimizer stay in fp32

    # Loss
    label_smoothing: float = 0.1  # label smoothing (0 to 1)
    loss_scale: float = 1024.0  # initial loss scale for fp16, halved by an overflow
    loss_scale_limit: float = 8192.0  # maximum loss scale
    loss_scale_interval: int = 128  # steps without an overflow until the loss scale is doubled

    # Optimizer
    batch_size: int = 256  # sentence pairs per rank and step
    optimizer: Literal["adam"] = "adam"  # Kingma and Ba 2015
    kernels: Literal["auto", "plain", "triton", "apex"] = "auto"  # of loss and attention; auto: the fastest, measured
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: the fastest available
    split_optimizer: bool = False  # each rank updates a shard of the weights, which is then all-gathered
    bucket_mb: int = 25  # megabytes of gradients per all-reduce, overlapped with the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # dtype of the all-reduce
    learning_rate: float = 0.002  # after the warm-up, for the global batch
    warmup_steps: int = 200  # exponential, from 1 % of learning_rate
    remain_steps: int = 6453  # step of the first decay
    decay_interval: int = 809  # steps between decays
    decay_steps: int = 4  # maximum number of decays
    decay_factor: float = 0.5  # factor on the learning rate per decay
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment
    gradient_clip: float = 5.0  # maximum gradient norm

    # Input
    max_length_train: int = 75  # maximum tokens per sentence with BOS and EOS; longer pairs are skipped
    batching: Literal["buckets", "shards", "lengths"] = "buckets"  # shards: as in v0.5; lengths: sorted by both lengths
    buckets: int = 5  # number of length buckets for batching=buckets
    shard_size: int = 80  # global batches per shard for batching=shards
    length_multiple: int = 0  # pad batch lengths to a multiple; 0: 8 in fp16 and bf16, else 1
    prefetch: int = 4  # batches prefetched by a thread

    # Evaluation
    eval_batch_size: int = 128  # sentences per rank
    beam_size: int = 5  # hypotheses per sentence
    max_length_test: int = 150  # maximum tokens per translation with BOS and EOS
    length_penalty: float = 0.6  # exponent of the length penalty (arXiv 1609.08144, equation 14)
    length_constant: float = 5.0  # its constant
    coverage_penalty: float = 0.1  # weight of the coverage penalty (the same equation)

    # Execution
    loss_chunk: int = 0  # positions per chunk of logits; 0: the fastest number for the device
    warm_up_steps: int = 1  # steps on the largest batch before run_start

    # Logging
    log_interval: int = 10  # steps per record of metrics.jsonl
    checkpoint_interval: int = 0  # epochs between checkpoints; 0: only on a signal

    @property
    def targets(self) -> Dict[str, float]:
        # Target of each quality, by the names of benchmark.toml.
        return {"bleu": self.quality_target}

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16", "fp16")
        at_least(self, 1, "width", "vocabulary_multiple", "batch_size", "eval_batch_size", "beam_size", "epochs")
        at_least(self, 1, "decay_interval", "buckets", "shard_size", "log_interval")
        at_least(self, 1, "loss_scale_interval")
        at_least(self, 2, "layers")
        at_least(self, 3, "max_length_train", "max_length_test")
        at_least(self, 0, "initial_weights", "warmup_steps", "remain_steps", "decay_steps", "warm_up_steps")
        at_least(self, 0, "loss_chunk", "length_multiple", "prefetch")
        at_least(self, 0, "bucket_mb", "checkpoint_interval", "length_penalty", "length_constant", "coverage_penalty")
        above_zero(self, "learning_rate", "epsilon", "decay_factor", "gradient_clip", "loss_scale")
        above_zero(self, "quality_target")
        reject_if(
            ("dropout must be at least 0 and below 1", not 0 <= self.dropout < 1),
            ("label_smoothing must be at least 0 and below 1", not 0 <= self.label_smoothing < 1),
            ("beta1 and beta2 must be in 0..1", not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)),
            ("loss_scale must not be above loss_scale_limit", self.loss_scale > self.loss_scale_limit),
            (
                "device=cpu has no apex: set optimizer_kernel=auto",
                self.device == "cpu" and self.optimizer_kernel == "apex",
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Mismatch]:
        return too_few(manifest, "pairs", self.batch_size * ranks)
