"""Hyperparameters of GNMT in PyTorch: one flat, frozen dataclass; standard library only.

The defaults are what NVIDIA's submissions of v0.6 and v0.7 have in common (the defaults of their train.py and
run_and_time.sh), and ours where those say nothing. "Epoch" is one pass over the training pairs, "step" one update.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, precision_on_cpu, reject_if, too_few


@dataclass(frozen=True)
class Config:
    # Everything that train.py needs to know, except where the data and the results are.

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # draws weights, dropout and the order of the pairs; a new one for each experiment
    round: Literal["v0.5", "v0.6", "v0.7"] = "v0.7"  # of MLPerf, in whose dialect the log is
    quality_target: float = 24.0  # BLEU, 0 to 100, at which the run stops
    epochs: int = 8  # at most
    stop_at_target: bool = True  # false trains all epochs and takes the best of them

    # The network (Wu et al. 2016, arXiv 1609.08144, as changed in "v2")
    width: int = 1024  # of embeddings, LSTM layers, attention and context
    layers: int = 4  # LSTM layers of the encoder, of which the first is bidirectional, and of the decoder
    dropout: float = 0.2  # share of values that is set to 0, see dropout_at
    dropout_at: Literal["inputs", "outputs"] = "inputs"  # of each LSTM; outputs: of all but the last, as v0.5
    initial_weights: float = 0.1  # uniform within +- this; 0: PyTorch's own initial weights, as v0.5
    vocabulary_multiple: int = 8  # the vocabulary is padded to a multiple of this
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and optimizer stay in fp32

    # The loss
    label_smoothing: float = 0.1  # probability mass given evenly to the whole vocabulary, 0 to 1
    loss_scale: float = 1024.0  # for fp16: first factor on the loss; halved where gradients overflow
    loss_scale_limit: float = 8192.0  # largest factor
    loss_scale_interval: int = 128  # steps without overflow after which the factor is doubled

    # The optimizer
    batch_size: int = 256  # sentence pairs per rank and step
    optimizer: Literal["adam"] = "adam"  # Kingma and Ba 2015
    kernels: Literal["auto", "plain", "triton", "apex"] = "auto"  # of loss and attention; auto: measured at start
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: the fastest that is there
    split_optimizer: bool = False  # each rank updates its share of the weights, the others get them from it
    bucket_mb: int = 25  # megabytes of gradients in an all-reduce, begun in the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # type in which gradients travel
    learning_rate: float = 0.002  # base value, after warm-up, for the global batch
    warmup_steps: int = 200  # exponential, from a hundredth of the base value
    remain_steps: int = 6453  # step at which the first decay is
    decay_interval: int = 809  # steps between decays
    decay_steps: int = 4  # decays at most
    decay_factor: float = 0.5  # of the learning rate at each decay
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment
    gradient_clip: float = 5.0  # largest norm of the whole gradient

    # The input
    max_length_train: int = 75  # tokens of a side, BOS and EOS included; pairs with a longer one are left out
    batching: Literal["buckets", "shards", "lengths"] = "buckets"  # shards: as v0.5; lengths: sorted by both sides
    buckets: int = 5  # for buckets: classes of lengths, from each of which batches are drawn
    shard_size: int = 80  # for shards: global batches per shard
    length_multiple: int = 0  # lengths of batches are multiples of this; 0: of 8 in fp16 and bf16, else of 1
    prefetch: int = 4  # batches read ahead by a thread

    # Evaluation
    eval_batch_size: int = 128  # sentences per rank that are decoded together
    beam_size: int = 5  # hypotheses per sentence
    max_length_test: int = 150  # tokens of a translation, BOS and EOS included
    length_penalty: float = 0.6  # power of the normalization by length (arXiv 1609.08144, equation 14)
    length_constant: float = 5.0  # constant in it
    coverage_penalty: float = 0.1  # factor on the coverage penalty (the same equation)

    # How it is computed
    loss_chunk: int = 0  # positions whose logits exist at a time; 0: as many as the device is fastest with
    warm_up_steps: int = 1  # on the largest batch, before the clock: takes memory, opens connections; 0 does none

    # Reports
    log_interval: int = 10  # steps per record in the metrics stream
    checkpoint_interval: int = 0  # epochs between checkpoints; 0 keeps none but on a signal

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

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Misfit]:
        return too_few(manifest, "pairs", self.batch_size * ranks)
