"""Count floating-point operations and bytes per step, operator by operator.

    from benchmarks.common.checks.step_cost import count
    cost = count(step)
    print(cost.flops, cost.moved, cost.by_class)

Operations are counted by torch.utils.flop_counter: 2 per multiply-add of GEMMs, convolutions and attention, forward
and backward; elementwise operators are not counted. Bytes are all operator inputs and outputs, except views: the
traffic without fusion and caches. A compiled step moves less, so that its intensity is at least the counted one.
Both counts work on the meta device, without computing anything.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Set, Tuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from benchmarks.common.checks.kernel_table import class_of

# Operators that allocate without writing
_NOTHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "resize_",
    "_unsafe_view",
}
# Operators that do not read their output
_WRITES = {"fill_", "zero_", "copy_", "normal_", "uniform_", "bernoulli_", "random_"}
# Operators that read only the returned rows of their first argument
_ROWS = {"embedding", "index", "index_select", "gather", "_embedding_bag", "_embedding_bag_forward_only"}
# Name parts of operators that contain GEMMs; those without a known count are reported.
_HEAVY = ("rnn", "lstm", "gru", "attention")


@dataclass(frozen=True)
class Cost:
    """Cost per call."""

    flops: int
    moved: int  # bytes read and written by its operators
    by_class: Mapping[str, Tuple[int, int]]  # operations and bytes by class of kernel_table
    uncounted: Tuple[str, ...] = ()  # operators with GEMMs whose count is unknown


def count(call: Callable[[], Any]) -> Cost:
    # The FLOP counter is outermost, to see operators before they are decomposed; bytes are counted as they run.
    traffic = _Traffic()
    counter = FlopCounterMode(display=False, custom_mapping=_more_counts())
    with traffic, counter:
        call()
    flops: Dict[str, int] = defaultdict(int)
    for operator, number in counter.get_flop_counts().get("Global", {}).items():
        flops[class_of(str(operator).replace(".", "::", 1))] += int(number)
    names = {**dict.fromkeys(flops, 0), **dict.fromkeys(traffic.moved, 0)}
    counted = {str(function).rpartition(".")[2] for function in (*flop_registry, *_more_counts())}
    return Cost(
        flops=int(counter.get_total_flops()),
        moved=sum(traffic.moved.values()),
        by_class={name: (flops.get(name, 0), traffic.moved.get(name, 0)) for name in names},
        uncounted=tuple(sorted(name for name in traffic.heavy if name not in counted)),
    )


def _more_counts() -> Dict[Any, Callable[..., int]]:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    counts: Dict[str, Callable[..., int]] = {
        name: _attention_forward,
        f"{name}_backward": _attention_backward,
        "_flash_attention_forward": _flash_count("_flash_attention_forward", 0),
        "_flash_attention_backward": _flash_count("_flash_attention_backward", 1),
    }
    return {
        getattr(torch.ops.aten, operator): count
        for operator, count in counts.items()
        if hasattr(torch.ops.aten, operator)
    }


def _flash_count(name: str, first: int) -> Callable[..., int]:
    """Return PyTorch's count with the kernel's layout (batch, length, heads, width) and window.

    PyTorch's formula reads dense inputs as (batch, heads, length, width), and ignores windows. ``first``: index of the
    queries, before keys and values.
    """

    def count(*arguments: Any, **options: Any) -> int:
        changed, window = list(arguments), options.get("window_size_left")
        if changed[first].dim() == 4:
            changed = [tensor.transpose(1, 2) if _is_dense(tensor) else tensor for tensor in changed]
            if window is not None:
                changed[first + 1 : first + 3] = [keys[:, :, : window + 1] for keys in changed[first + 1 : first + 3]]
        return int(flop_registry[getattr(torch.ops.aten, name)](*changed, **options))

    count._get_raw = True  # type: ignore[attr-defined]  # takes tensors instead of shapes
    return count


def _is_dense(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.dim() == 4


# Count two products of shapes (batch, heads, length, width).
def _attention_forward(query: Tuple[int, ...], key: Tuple[int, ...], value: Tuple[int, ...], *_: Any, **__: Any) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (width + value[3])


# Five GEMMs: the weights again, and the gradients of weights, values, queries and keys.
def _attention_backward(
    _gradient: Tuple[int, ...], query: Tuple[int, ...], key: Tuple[int, ...], value: Tuple[int, ...], *_: Any, **__: Any
) -> int:
    batch, heads, length, width = query
    return 2 * batch * heads * length * key[2] * (3 * width + 2 * value[3])


class _Traffic(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moved: Dict[str, int] = defaultdict(int)
        self.heavy: Set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func._schema.name)
        bare = name.rpartition("::")[2]
        if any(part in bare for part in _HEAVY):
            self.heavy.add(bare)
        if bare not in _NOTHING and not _is_view(func):
            self.moved[class_of(name)] += _moved(bare, args, kwargs or {}, result)
        return result


def _is_view(func: Any) -> bool:
    returned = func._schema.returns
    return bool(returned) and all(
        tensor.alias_info is not None and not tensor.alias_info.is_write for tensor in returned
    )


def _moved(bare: str, args: Any, kwargs: Dict[str, Any], result: Any) -> int:
    output_bytes = sum(map(_bytes, _tensors(result)))
    if not _tensors(result):
        # In-place operators on several tensors return nothing.
        output_bytes = sum(map(_bytes, _tensors(args[0]))) if bare.endswith("_") and args else 0
    read: List[torch.Tensor] = _tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
    if bare in _WRITES or bare in _ROWS:
        rows = output_bytes if bare in _ROWS else 0
        return output_bytes + rows + sum(map(_bytes, read[1:]))
    return output_bytes + sum(map(_bytes, read))


def _tensors(tree: Any) -> List[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# Return a tensor's bytes; repeated elements in an expanded tensor count once.
def _bytes(tensor: torch.Tensor) -> int:
    repeated = 1
    for size, stride in zip(tensor.shape, tensor.stride() if tensor.layout is torch.strided else ()):
        repeated *= size if stride == 0 and size > 0 else 1
    return tensor.numel() // repeated * tensor.element_size()
