"""Hyperparameters of Llama 2 70B's fine-tuning in PyTorch: one flat, frozen dataclass; standard library only.

The host side loads this file to check a configuration before anything starts, the training code to run it. Defaults
are those of the reference (mlcommons/training, llama2_70b_lora: README.md and scripts/train.py with Hugging Face's
Trainer), of the network's config.json, and ours where those say nothing. "Sample" is a packed sequence, "step" one
update of the adapters.
"""

from dataclasses import dataclass
from typing import Dict, List, Literal

from benchmarks.common.config_checks import Manifest, Misfit, above_zero, at_least, precision_on_cpu, reject_if
from benchmarks.llama import memory
from benchmarks.llama.config_checks import Derived, problems, problems_of_fp8, rank_mismatches
from benchmarks.llama.shapes import Scaling, Shape


@dataclass(frozen=True)
class Config(Derived):
    # Everything that train.py needs to know, except where the data and the results are.

    # The run
    device: Literal["gpu", "cpu"] = "gpu"  # one rank drives one GPU, or its share of the CPU's cores
    seed: int = 0  # draws the adapters, dropout and the order of the samples; a new one for each experiment
    round: Literal["v4.0", "v4.1", "v5.0", "v5.1", "v6.0", "v6.1"] = "v6.1"  # of MLPerf, in whose dialect the log is
    quality_target: float = 0.925  # loss on the evaluation set, or below, at which the run stops
    epochs: int = 1  # of the log: a run is one of as many samples as max_steps allow
    max_steps: int = 1024  # at which the learning rate is end_learning_rate and the run ends
    base: str = ""  # file of the weights to adapt, or its name in the data folder; empty: random ones

    # The network (Touvron et al. 2023, arXiv 2307.09288, 70B)
    sequence_length: int = 8192  # tokens of a sample
    layers: int = 80  # each an attention and a feed-forward network
    width: int = 8192  # of the embeddings and of what layers exchange
    heads: int = 64  # of queries in each attention
    key_value_heads: int = 8  # of keys and values, each shared by as many queries' heads
    inner_width: int = 28672  # of the feed-forward networks
    rope_base: float = 10000.0  # of the rotary positions' wavelengths
    norm_epsilon: float = 1e-5  # of RMSNorm
    vocabulary_multiple: int = 128  # the vocabulary is padded to a multiple of this
    initial_weights: float = 0.02  # standard deviation of a random base; what layers add has it / (2 * layers) ** 0.5
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"  # of GEMMs, activations and the base; adapters stay in fp32

    # The adapters (Hu et al. 2021, arXiv 2106.09685)
    lora_rank: int = 16  # columns of the first matrix, rows of the second
    lora_alpha: int = 32  # their product counts lora_alpha / lora_rank
    lora_dropout: float = 0.1  # of their inputs

    # The input
    batch_size: int = 1  # samples per rank and step; a group that splits a sample has those of its ranks
    micro_batch: int = 1  # samples that a group computes at once, at most
    prefetch: int = 4  # batches built ahead by threads

    # The optimizer
    optimizer: Literal["adamw"] = "adamw"  # Loshchilov and Hutter 2019, arXiv 1711.05101
    learning_rate: float = 4e-4  # at first
    end_learning_rate: float = 0.0  # at max_steps
    warmup_steps: int = 0  # linear
    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.999  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0001  # of the adapters
    gradient_clip: float = 0.3  # largest norm of the whole gradient

    # How it is split over the ranks: by samples and, with the weights, gradients and AdamW's state, by FSDP
    tensor_parallelism: int = 1  # ranks that share the GEMMs of a sample, and by positions what is between them
    context_parallelism: int = 1  # ranks that share the positions of a sample
    gradient_reduction: Literal["fp32", "bf16"] = "fp32"  # type in which gradients are summed over the ranks

    # Evaluation: the first ones are left out, as many as the rules say for the global batch (schedule.py)
    eval_interval_samples: int = 384  # samples trained on between two

    # How it runs
    recompute: bool = True  # the activations within a layer in the backward pass
    recompute_layers: int = 0  # with recompute=false: number of layers, from the first on, that do it
    fp8: Literal["none", "scaled_mm"] = "none"  # the base's layers: kept in FP8, and their GEMMs in it
    loss_rows: int = 2048  # positions whose logits exist at a time; 0: all of a micro-batch
    compile: bool = False  # on a GPU: torch.compile of each layer and the loss
    warm_up_steps: int = 2  # on synthetic data, before the clock; 0 does none
    log_interval: int = 10  # steps per record in the metrics stream, and between looks for a signal
    checkpoint_interval: int = 0  # evaluations between checkpoints; 0 keeps none but on a signal

    def shape(self, vocabulary: int) -> Shape:
        scaling = Scaling()
        return Shape(
            vocabulary,
            self.layers,
            self.width,
            self.heads,
            self.key_value_heads,
            self.inner_width,
            self.rope_base,
            scaling,
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

    # -- memory: a model by formula, which a test compares with what PyTorch keeps ---------------------------

    def adapters(self, tensor_parallelism: int = 1) -> int:
        """Count the weights of the adapters in a layer, those more than once that all ranks of a GEMM have whole."""
        return self.lora_rank * (2 * self.width * (tensor_parallelism + 1) + 2 * self.shape(1).keys)

    def kept(self) -> int:
        """Return the bytes that a layer keeps of a position for the backward pass.

        Inputs of both norms, of the adapters (with a mask of a byte a value), of attention and what it found, the gate
        before and behind its function and what it multiplies: the base is frozen, so that no GEMM keeps its input.
        Without dropout an adapter reads what attention keeps.
        """
        dropped = self.lora_dropout > 0
        values = (6 if dropped else 5) * self.width + 2 * self.shape(1).keys + 3 * self.inner_width
        return memory.size_of(self) * values + (2 * self.width if dropped else 0)

    def needed_memory(self, vocabulary: int, ranks: int) -> float:
        """Return the bytes that a rank needs: weights, what it gathers, adapters, activations and logits."""
        weights = memory.weights_of(self, vocabulary)
        size = memory.size_of(self)
        base = weights.layer * self.layers * (size if self.fp8 == "none" else 1) + weights.outside * size
        adapters = self.adapters(self.tensor_parallelism) * self.layers
        # In fp32: adapters and both moments, their gradients
        parameters = memory.Parameters(base + 12 * adapters, 4 * adapters, trains_weights=False)
        return memory.needed(self, vocabulary, ranks, parameters, self.kept())

    def mismatches(self, manifest: Manifest, ranks: int, available: float) -> List[Misfit]:
        """Return why the data set, the number of ranks or the memory (bytes per rank) does not fit."""
        mismatches = rank_mismatches(self, ranks)
        length, vocabulary = manifest["facts"]["sequence_length"], manifest["facts"]["vocabulary"]
        if length != self.sequence_length:
            hint = f"set sequence_length={length}, or prepare it again with --sequence-length"
            mismatches.append((f"samples of {length:,} tokens", f"sequence_length={self.sequence_length}", hint))
        return mismatches + memory.mismatches(self, self.needed_memory(vocabulary, ranks), available)
