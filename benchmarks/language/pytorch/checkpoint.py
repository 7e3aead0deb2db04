"""Weights of BERT from a file: Hugging Face's names, NVIDIA's, TensorFlow's published checkpoint, a run's own.

    $ python -m benchmarks.language.pytorch.checkpoint model.ckpt-28252.index bert.pt

writes the weights of any of them as one PyTorch file with Hugging Face's names, for a run's ``checkpoint``.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from benchmarks.common.data.problem import Problem
from benchmarks.common.torch import files
from benchmarks.language.pytorch.encoder import Encoder
from benchmarks.language.tensorflow_files import Bundle

Tensors = Dict[str, torch.Tensor]
EMBEDDINGS = ("word_embeddings", "position_embeddings", "token_type_embeddings")
SELF = ("query", "key", "value")
# Hugging Face's names of our modules: three for queries, keys and values.
IN_LAYER = {
    "qkv": [f"attention.self.{projection}" for projection in SELF],
    "out": ["attention.output.dense"],
    "attention_norm": ["attention.output.LayerNorm"],
    "inner": ["intermediate.dense"],
    "outer": ["output.dense"],
    "norm": ["output.LayerNorm"],
}
OUTSIDE = {
    **{f"encoder.{name}": f"bert.embeddings.{name}" for name in EMBEDDINGS},
    "encoder.norm": "bert.embeddings.LayerNorm",
    "pooler.dense": "bert.pooler.dense",
    "transform": "cls.predictions.transform.dense",
    "transform_norm": "cls.predictions.transform.LayerNorm",
    "next": "cls.seq_relationship",
}
WORDS = "bert.embeddings.word_embeddings.weight"
WORDS_BIAS = "cls.predictions.bias"
# Names that a file may have in addition to an encoder.
OTHER_TASKS = ("cls.", "bert.pooler.", "qa_outputs.", "classifier.")
# Optimizer state, and copies: the decoder weight is the word embedding, its bias the prediction bias.
NO_WEIGHTS = re.compile(
    r"(^|[./])(adam_[mv]|LAMB(_1)?|global_step|beta[12]_power|good_steps|loss_scale|position_ids|decoder\.(weight|bias))\b"
)
RENAMED = {
    r"^module\.": "",
    r"\.beta$": ".bias",
    r"\.gamma$": ".weight",
    # NVIDIA's own attention (remap_attn_parameters of run_pretraining.py)
    **{rf"multi_head_attention\.{name[0]}_(weight|bias)$": rf"self.{name}.\1" for name in SELF},
    r"multi_head_attention\.out_proj_(weight|bias)$": r"output.dense.\1",
    r"attention\.layer_norm\.": "attention.output.LayerNorm.",
}
MULTIPLE = 8  # word embedding rows are padded to multiples of this
EXPECTED = (
    "weights of BERT: a PyTorch file, or the .index of a TensorFlow checkpoint",
    "give another file; `python -m benchmarks.language.pytorch.checkpoint FILE OUT` converts one",
)


def published_names(name: str) -> List[str]:
    # Return Hugging Face's names for one of our parameters.
    prefix, _, kind = name.rpartition(".")
    if name == "words_bias":
        return [WORDS_BIAS]
    if prefix in OUTSIDE:
        return [f"{OUTSIDE[prefix]}.{kind}"]
    _, _, number, module = prefix.split(".")
    return [f"bert.encoder.layer.{number}.{part}.{kind}" for part in IN_LAYER[module]]


def published_tensors(state: Mapping[str, torch.Tensor]) -> Tensors:
    # Return parameter views by Hugging Face's names; ``state`` has our names, such as ``encoder.layers.0.qkv.weight``.
    tensors: Tensors = {}
    for name, tensor in state.items():
        names = published_names(name)
        tensors.update(zip(names, tensor.detach().chunk(len(names))))
    return tensors


# -- reading -------------------------------------------------------------------------------------------


def read(path: Path) -> Tensors:
    # Return a file's weights by Hugging Face's names. Raises Problem if it is not a weights file.
    if path.suffix == ".index":
        return dict(_of_tensorflow(Bundle(path)))
    content = files.load(path, *EXPECTED)
    for wrapper in ("content", "network", "model", "state_dict"):
        content = content[wrapper] if isinstance(content.get(wrapper), dict) else content
    tensors = files.tensors_of(content)
    if not tensors:
        raise Problem(f"{path} contains no weights", *EXPECTED)
    return dict(_renamed(tensors))


def _renamed(tensors: Tensors) -> Iterator[Tuple[str, torch.Tensor]]:
    if any(".qkv." in name for name in tensors):
        yield from published_tensors(tensors).items()
        return
    bare = not any(name.startswith(("bert.", "module.bert.")) for name in tensors)
    for name, tensor in tensors.items():
        if NO_WEIGHTS.search(name):
            continue
        for theirs_name, published in RENAMED.items():
            name = re.sub(theirs_name, published, name)
        yield (f"bert.{name}" if bare and name.startswith(("embeddings.", "encoder.", "pooler.")) else name), tensor


def _of_tensorflow(bundle: Bundle) -> Iterator[Tuple[str, torch.Tensor]]:
    # Yield the weights in a google-research/bert checkpoint (the submission's load_tf_weights_in_bert).
    for name in bundle.entries:
        if NO_WEIGHTS.search(name) or name.startswith("_CHECKPOINTABLE"):
            continue
        *folders, last = re.sub(r"layer_(\d+)", r"layer/\1", name).split("/")
        array = bundle.read(name)
        if last == "kernel":  # (in, out) there
            array = array.T
        if last.endswith("_embeddings"):
            folders.append(last)
        kind = {"gamma": "weight", "beta": "bias", "output_bias": "bias", "bias": "bias"}.get(last, "weight")
        yield ".".join([*folders, kind]), torch.from_numpy(array.copy())


# -- loading -------------------------------------------------------------------------------------------


def load_weights(encoder: Encoder, path: Path) -> None:
    # Load a file's weights into an encoder, ignoring heads; raises Problem with all mismatches.
    state = {f"encoder.{name}": tensor for name, tensor in encoder.state_dict().items()}
    fill(published_tensors(state), read(path), path, OTHER_TASKS)


@torch.no_grad()
def fill(parameters: Tensors, tensors: Tensors, path: Path, may_have: Sequence[str] = ()) -> None:
    """Copy weights to the ``parameters`` with the same names.

    Args:
        parameters: destination by Hugging Face's names.
        tensors: weights by Hugging Face's names.
        path: weights file, for messages.
        may_have: prefixes of additional names that the file may have.

    Raises:
        Problem: weights are missing, unexpected or have a different shape; names all.
    """
    there = {name for name in tensors if name in parameters or not name.startswith(tuple(may_have) or "\0")}
    problems = [f"{name} is missing" for name in sorted(set(parameters) - there)]
    problems += [f"{name} is unexpected" for name in sorted(there - set(parameters))]
    problems += [
        f"{name} has {list(tensors[name].shape)} instead of {list(parameters[name].shape)}"
        for name in sorted(there & set(parameters))
        if not _fits(name, tensors[name], parameters[name])
    ]
    if problems:
        raise Problem(
            f"{path} does not fit: {'; '.join(problems)}",
            "the weights of this network, whose sizes are layers, width, inner_width, positions and the vocabulary",
            "set these keys to the file's values, or pass another checkpoint",
        )
    for name in parameters:
        rows = min(len(parameters[name]), len(tensors[name]))
        parameters[name].zero_()[:rows].copy_(tensors[name][:rows])


def _fits(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    # Return whether the shapes are equal; the vocabulary may be padded in only one.
    if name not in (WORDS, WORDS_BIAS):
        return tensor.shape == parameter.shape
    return tensor.shape[1:] == parameter.shape[1:] and -(-len(tensor) // MULTIPLE) == -(-len(parameter) // MULTIPLE)


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="file of weights; for TensorFlow, the .index")
    parser.add_argument("out", type=Path, help="PyTorch file to write")
    arguments = parser.parse_args(argv)
    try:
        tensors = read(arguments.source)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return problem.code
    torch.save(tensors, str(arguments.out))
    print(f"{len(tensors)} tensors, {sum(tensor.numel() for tensor in tensors.values()):,} weights in {arguments.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
