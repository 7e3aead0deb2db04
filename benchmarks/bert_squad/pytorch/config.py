"""Hyperparameters of BERT on SQuAD in PyTorch: one flat, frozen dataclass; standard library only.

The host side loads this file to check a configuration before anything starts, the training code to run it.
Values come from ``systems/*.toml`` and the command line; the defaults are those of NVIDIA's DeepLearningExamples
(PyTorch/LanguageModeling/BERT: scripts/run_squad.sh, run_squad.py, bert_configs/large.json), and ours where those say
nothing. "Window" is a question with a part of its paragraph, "epoch" one pass over the training windows, "step" one
update of the weights.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, reject_if, too_few

Attention = Literal["auto", "flash", "varlen", "grouped", "padded"]


@dataclass(frozen=True)
class Config:
    # Everything that train.py needs to know, except where the data and the results are.

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # draws the span head, dropout and the order of the windows; a new one for each experiment
    round: Literal["published"] = "published"  # none of MLPerf: the log has the lines of v0.7
    quality_target: float = 90.68  # F1 over the test questions, 0..100, at which the run stops
    epochs: int = 2  # the rate falls to 0 at the end of the last
    stop_at_target: bool = True  # false trains all epochs and takes the best of them
    checkpoint: str = ""  # file of the pretrained weights to begin with; empty: random ones

    # The network (Devlin et al. 2018, arXiv 1810.04805, "large")
    layers: int = 24  # of the encoder
    width: int = 1024  # of the embeddings and of what layers exchange
    heads: int = 16  # of each attention
    inner_width: int = 4096  # of the feed-forward layers
    positions: int = 512  # rows of the table of positions: the longest window that the weights are for
    vocabulary_multiple: int = 8  # the vocabulary is padded to a multiple of this
    initializer_range: float = 0.02  # standard deviation of the weights that are drawn
    gelu: Literal["erf", "tanh"] = "erf"  # exact, as published, or its approximation
    precision: Literal["fp16", "bf16", "tf32", "fp32"] = "fp16"  # of activations; weights and Adam stay in fp32
    dropout: float = 0.1  # of embeddings and of each block's output
    attention_dropout: float = 0.1  # of the attentions' weights

    # The input
    sequence_length: int = 384  # tokens of a window, at most; the data set must have been cut to it
    batch_size: int = 4  # windows per rank and step
    token_bucket: int = 512  # rows are filled up to a multiple of it, in tokens, where cuda_graph needs it
    prefetch: int = 4  # batches built ahead by a thread

    # The optimizer
    optimizer: Literal["adam"] = "adam"  # with decoupled weight decay and without the correction of the bias
    optimizer_kernel: Literal["auto", "apex", "fused", "plain"] = "auto"  # auto: measured before the first step
    bucket_mb: int = 25  # megabytes of gradients in an all-reduce, begun in the backward pass; 0: one, after it
    gradient_compression: Literal["none", "fp16", "bf16"] = "none"  # type in which gradients travel
    learning_rate: float = 3e-5  # at the end of the warm-up
    warmup_fraction: float = 0.1  # of all steps, linear from 0; then linear to 0
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment: apex's FusedAdam; BertAdam has 1e-6
    weight_decay: float = 0.01  # of products and tables; biases and layer norms have none
    gradient_clip: float = 1.0  # largest norm of the whole gradient; 0: any
    loss_scale: float = 65536.0  # for fp16: the first factor on the loss, halved by an overflow
    loss_scale_window: int = 2000  # steps without an overflow after which loss_scale is doubled

    # Evaluation
    eval_interval: int = 0  # epochs between evaluations; 0: after the last alone
    eval_batch_size: int = 32  # windows per rank that are answered at once
    n_best: int = 20  # first and last tokens of a window that are paired, and answers that are kept
    longest_answer: int = 30  # tokens

    # How it runs
    attention: Attention = "auto"  # see benchmarks/language/pytorch/attention.py
    compile: bool = False  # on a GPU: torch.compile of each layer, for rows of any length
    cuda_graph: bool = False  # on a GPU: forward and backward as one graph for each length of row
    warm_up_steps: int = 3  # on synthetic data, before the clock; 0 does none
    log_interval: int = 50  # steps per record in the metrics stream, and between looks for a signal
    checkpoint_interval: int = 0  # epochs between checkpoints; 0 keeps none but on a signal

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

    def mismatches(self, manifest: Manifest, ranks: int, memory: float) -> List[Misfit]:
        mismatches = too_few(manifest, "windows", self.batch_size * ranks)
        length, expected = manifest["facts"]["sequence_length"], self.sequence_length
        if length != expected:
            hint = f"set sequence_length={length}, or prepare the data again with --sequence-length {expected}"
            mismatches.append((f"windows of {length} tokens", f"sequence_length={expected}", hint))
        return mismatches
