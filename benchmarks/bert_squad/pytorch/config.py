"""Hyperparameters of BERT on SQuAD in PyTorch: one flat, frozen dataclass; standard library only.

The host loads this file to check a configuration, the training code to use it. Defaults are those of NVIDIA's
DeepLearningExamples (PyTorch/LanguageModeling/BERT: scripts/run_squad.sh, run_squad.py, bert_configs/large.json). A
window is a question with a part of the paragraph.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Mismatch, above_zero, at_least, reject_if, too_few

Attention = Literal["auto", "flash", "varlen", "grouped", "padded"]


@dataclass(frozen=True)
class Config:
    # All parameters of train.py except its folders.

    # Run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for span head, dropout and window order; new for every experiment
    round: Literal["published"] = "published"  # not an MLPerf benchmark; the log has the format of v0.7
    quality_target: float = 90.68  # F1 (0 to 100) at which the run stops
    epochs: int = 2  # the learning rate reaches 0 at the end of the last one
    stop_at_target: bool = True  # false: train all epochs; the best one counts
    checkpoint: str = ""  # file with pretrained weights; empty: random

    # Network (Devlin et al. 2018, arXiv 1810.04805, BERT-Large)
    layers: int = 24  # encoder layers
    width: int = 1024  # hidden size
    heads: int = 16  # attention heads
    inner_width: int = 4096  # intermediate size of the MLP
    positions: int = 512  # rows of the position embedding of the pretrained weights
    vocabulary_multiple: int = 8  # pad the vocabulary to a multiple of this
    initializer_range: float = 0.02  # standard deviation of random weights
    gelu: Literal["erf", "tanh"] = "erf"  # exact as published, or the tanh approximation
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and Adam stay in fp32
    dropout: float = 0.1  # dropout rate of embeddings and block outputs
    attention_dropout: float = 0.1  # dropout rate of attention weights

    # Input
    sequence_length: int = 384  # maximum tokens per window, as in the data set
    batch_size: int = 4  # windows per rank and step
    token_bucket: int = 512  # pad packed rows to a multiple of this many tokens, for cuda_graph
    prefetch: int = 4  # batches prefetched by a thread

    # Optimizer
    optimizer: Literal["adam"] = "adam"  # decoupled weight decay, no bias correction
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: the fastest, measured before step 1
    bucket_mb: int = 25  # megabytes of gradients per all-reduce, overlapped with the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # dtype of the all-reduce
    learning_rate: float = 3e-5  # after the warm-up
    warmup_fraction: float = 0.1  # fraction of all steps: linear from 0, then linear to 0
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment; as in apex's FusedAdam (BertAdam: 1e-6)
    weight_decay: float = 0.01  # of all parameters except biases and layer norms
    gradient_clip: float = 1.0  # maximum gradient norm; 0: none
    loss_scale: float = 65536.0  # initial loss scale for fp16, halved by an overflow
    loss_scale_window: int = 2000  # steps without an overflow until the loss scale is doubled

    # Evaluation
    eval_interval: int = 0  # epochs between evaluations; 0: only after the last
    eval_batch_size: int = 32  # windows per rank
    n_best: int = 20  # start and end candidates per window, and answers kept
    longest_answer: int = 30  # maximum tokens of an answer

    # Execution
    attention: Attention = "auto"  # see benchmarks/language/pytorch/attention.py
    compile: bool = False  # torch.compile of each layer with dynamic shapes; GPU only
    cuda_graph: bool = False  # capture forward and backward, one graph per row length; GPU only
    warm_up_steps: int = 3  # steps on synthetic data before run_start
    log_interval: int = 50  # steps per record of metrics.jsonl, and between checks for signals
    checkpoint_interval: int = 0  # epochs between checkpoints; 0: only on a signal

    @property
    def targets(self) -> Dict[str, float]:
        # Target of each quality, by the names of benchmark.toml.
        return {"f1": self.quality_target}

    def __post_init__(self) -> None:
        at_least(self, 1, "layers", "width", "heads", "inner_width", "vocabulary_multiple", "batch_size", "epochs")
        at_least(self, 1, "eval_batch_size", "n_best", "longest_answer", "log_interval", "loss_scale_window")
        at_least(self, 1, "token_bucket")
        at_least(self, 16, "sequence_length")
        at_least(self, 0, "prefetch", "warm_up_steps", "checkpoint_interval", "eval_interval", "gradient_clip")
        at_least(self, 0, "bucket_mb", "weight_decay")
        above_zero(self, "quality_target", "learning_rate", "epsilon", "loss_scale", "warmup_fraction")
        above_zero(self, "initializer_range")
        reject_if(
            ("device=cpu has no tf32: set precision=fp32", self.device == "cpu" and self.precision == "tf32"),
            ("device=cpu has no fp16: set precision=fp32 or bf16", self.device == "cpu" and self.precision == "fp16"),
            (
                "device=cpu has no apex: set optimizer_kernel=auto",
                self.device == "cpu" and self.optimizer_kernel == "apex",
            ),
            (
                f"device=cpu has no {self.attention} attention: set attention=auto",
                self.device == "cpu" and self.attention in ("flash", "varlen"),
            ),
            ("device=cpu does not support compile: set compile=false", self.device == "cpu" and self.compile),
            ("device=cpu has no CUDA graphs: set cuda_graph=false", self.device == "cpu" and self.cuda_graph),
            (
                "attention=grouped reads lengths on the host, which a CUDA graph cannot: set attention=auto or "
                "cuda_graph=false",
                self.cuda_graph and self.attention == "grouped",
            ),
            (
                "attention=varlen does not support dropout: set attention_dropout=0",
                self.attention == "varlen" and self.attention_dropout > 0,
            ),
            (f"width={self.width} must be a multiple of heads={self.heads}", self.width % self.heads != 0),
            (
                f"sequence_length={self.sequence_length} is above positions={self.positions}",
                self.sequence_length > self.positions,
            ),
            ("quality_target is F1 in 0..100", self.quality_target > 100),
            ("warmup_fraction must be below 1", self.warmup_fraction >= 1),
            ("beta1 and beta2 must be in 0..1", not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1)),
            *(
                (f"{name} must be at least 0 and below 1", not 0 <= getattr(self, name) < 1)
                for name in ("dropout", "attention_dropout")
            ),
        )

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Mismatch]:
        mismatches = too_few(manifest, "windows", self.batch_size * ranks)
        length, expected = manifest["facts"]["sequence_length"], self.sequence_length
        if length != expected:
            hint = f"set sequence_length={length}, or prepare the data again with --sequence-length {expected}"
            mismatches.append((f"windows of {length} tokens", f"sequence_length={expected}", hint))
        return mismatches
