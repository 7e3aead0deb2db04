"""Hyperparameters of Llama 2 70B's fine-tuning in PyTorch: one flat, frozen dataclass; standard library only.

The host loads this file to check a configuration, the training code to use it. Defaults are those of the reference
(mlcommons/training, llama2_70b_lora: README.md and scripts/train.py with Hugging Face's Trainer) and of the model's
config.json. A sample is a packed sequence.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Mismatch, above_zero, at_least, precision_on_cpu, reject_if
from benchmarks.llama import memory
from benchmarks.llama.config_checks import Derived, problems, problems_of_fp8, rank_mismatches
from benchmarks.llama.shapes import Scaling, Shape


@dataclass(frozen=True)
class Config(Derived):
    # All parameters of train.py except its folders.

    # Run
    device: Literal["gpu", "cpu"] = "gpu"  # a rank uses one GPU, or a part of the CPU cores
    seed: int = 0  # for adapters, dropout and sample order; new for every experiment
    round: Literal["v4.0", "v4.1", "v5.0", "v5.1", "v6.0", "v6.1"] = "v6.1"  # MLPerf round; determines the log format
    quality_target: float = 0.925  # evaluation loss at or below which the run stops
    epochs: int = 1  # always 1; max_steps sets the length
    max_steps: int = 1024  # end of decay and run
    base: str = ""  # frozen weights: path, or file name in the data folder; empty: random

    # Network (Touvron et al. 2023, arXiv 2307.09288, 70B)
    sequence_length: int = 8192  # tokens per sample
    layers: int = 80  # Transformer layers
    width: int = 8192  # hidden size
    heads: int = 64  # query heads
    key_value_heads: int = 8  # key and value heads (grouped-query attention)
    inner_width: int = 28672  # intermediate size of the MLP
    rope_base: float = 10000.0  # base of the rotary embedding
    norm_epsilon: float = 1e-5  # epsilon of RMSNorm
    vocabulary_multiple: int = 128  # pad the vocabulary to a multiple of this
    initial_weights: float = 0.02  # standard deviation of a random base; output projections: / (2 * layers) ** 0.5
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"  # of GEMMs, activations and the base; adapters stay in fp32

    # Adapters (Hu et al. 2021, arXiv 2106.09685)
    lora_rank: int = 16  # rank of the adapters
    lora_alpha: int = 32  # scale of the adapters: lora_alpha / lora_rank
    lora_dropout: float = 0.1  # dropout rate of adapter inputs

    # Input
    batch_size: int = 1  # samples per step of a data-parallel rank: a rank, or the ranks that share samples
    micro_batch: int = 1  # maximum samples per micro-batch of a tensor- or context-parallel group
    prefetch: int = 4  # batches prefetched by threads

    # Optimizer
    optimizer: Literal["adamw"] = "adamw"  # Loshchilov and Hutter 2019, arXiv 1711.05101
    learning_rate: float = 4e-4  # initial value
    end_learning_rate: float = 0.0  # at max_steps
    warmup_steps: int = 0  # linear
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0001  # of the adapters
    gradient_clip: float = 0.3  # maximum gradient norm

    # Parallelism, besides data parallelism with FSDP
    tensor_parallelism: int = 1  # tensor-parallel ranks, with sequence parallelism
    context_parallelism: int = 1  # context-parallel ranks
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"  # dtype of the reduce-scatter

    # Evaluation; schedule.py skips the first ones as the rules of the round require
    eval_interval_samples: int = 384  # training samples between evaluations

    # Execution
    recompute: bool = True  # activation checkpointing of every layer
    recompute_layers: int = 0  # with recompute=false: number of first layers with activation checkpointing
    fp8: Literal["none", "scaled_mm"] = "none"  # store the base's layers and compute their GEMMs in FP8
    loss_rows: int = 2048  # positions per chunk of logits; 0: all of a micro-batch
    attention: Literal["auto", "default", "cudnn"] = "auto"  # kernel; auto: cuDNN's if faster than the default
    compile: bool = False  # torch.compile of each layer and the loss; GPU only
    warm_up_steps: int = 2  # steps on synthetic data before run_start
    log_interval: int = 10  # steps per record of metrics.jsonl, and between checks for signals
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0: only on a signal

    def shape(self, vocabulary: int) -> Shape:
        return Shape(
            vocabulary,
            self.layers,
            self.width,
            self.heads,
            self.key_value_heads,
            self.inner_width,
            self.rope_base,
            Scaling(),
            self.norm_epsilon,
        )

    @property
    def targets(self) -> Dict[str, float]:
        # Target of each quality, by the names of benchmark.toml.
        return {"eval_loss": self.quality_target}

    def __post_init__(self) -> None:
        precision_on_cpu(self, "fp32", "bf16")
        at_least(self, 1, "max_steps", "layers", "width", "heads", "key_value_heads", "inner_width", "lora_rank")
        at_least(self, 1, "vocabulary_multiple", "batch_size", "micro_batch", "eval_interval_samples", "log_interval")
        at_least(self, 1, "tensor_parallelism", "context_parallelism")
        at_least(self, 2, "sequence_length")
        at_least(self, 0, "prefetch", "warmup_steps", "end_learning_rate", "weight_decay", "loss_rows", "warm_up_steps")
        at_least(self, 0, "recompute_layers", "checkpoint_interval", "lora_dropout")
        above_zero(self, "learning_rate", "epsilon", "norm_epsilon", "gradient_clip", "quality_target", "rope_base")
        above_zero(self, "initial_weights", "lora_alpha")
        reject_if(
            (f"recompute_layers must be at most layers={self.layers}", self.recompute_layers > self.layers),
            ("epochs must be 1: set max_steps to train longer", self.epochs != 1),
            ("lora_dropout must be below 1", self.lora_dropout >= 1),
            ("device=cpu does not support compile: set compile=false", self.device == "cpu" and self.compile),
            *problems(self),
            *problems_of_fp8(self),
        )

    # -- memory; a test compares the formulas with PyTorch's saved tensors ---------------------------

    def adapters(self, tensor_parallelism: int = 1) -> int:
        """Return the adapter weights per layer; those replicated over tensor-parallel ranks count once per rank."""
        return self.lora_rank * (2 * self.width * (tensor_parallelism + 1) + 2 * self.shape(1).keys)

    def activation_bytes(self) -> int:
        """Return the bytes of activations per layer and position for the backward pass.

        Inputs of both norms, adapter inputs and dropout masks, queries, keys, values, the attention output, gate,
        silu(gate) and up. GEMMs of the frozen base save no inputs. Without dropout, adapters share saved tensors.
        """
        dropped = self.lora_dropout > 0
        values = (6 if dropped else 5) * self.width + 2 * self.shape(1).keys + 3 * self.inner_width
        return memory.size_of(self) * values + (2 * self.width if dropped else 0)

    def needed_memory(self, vocabulary: int, ranks: int) -> float:
        """Return the bytes per rank: weights, gathered weights, adapters, activations and logits."""
        weights = memory.weights_of(self, vocabulary)
        size = memory.size_of(self)
        base = weights.layer * self.layers * (size if self.fp8 == "none" else 1) + weights.outside * size
        adapters = self.adapters(self.tensor_parallelism) * self.layers
        return memory.needed(
            self,
            vocabulary,
            ranks,
            state=base + 12 * adapters,  # fp32: adapters and moments
            gradients=4 * adapters,
            activation_bytes=self.activation_bytes(),
            trains_weights=False,
        )

    def mismatches(self, manifest: Manifest, ranks: int, available: float) -> List[Mismatch]:
        """Check the data set, the number of ranks and the memory (bytes per rank)."""
        mismatches = rank_mismatches(self, ranks)
        length, vocabulary = manifest["facts"]["sequence_length"], manifest["facts"]["vocabulary"]
        if length != self.sequence_length:
            hint = f"set sequence_length={length}, or prepare it again with --sequence-length"
            mismatches.append((f"samples of {length:,} tokens", f"sequence_length={self.sequence_length}", hint))
        return mismatches + memory.mismatches(self, self.needed_memory(vocabulary, ranks), available)
