"""The kernels of attention that GPUs alone have, called as their operators' schemas in this PyTorch have it."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common.run import choices
from benchmarks.language.pytorch import attention

CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda")
OFFSETS = torch.tensor([0, 5, 22, 22, 40], dtype=torch.int32)
# What the operators call what they are given, by the name it has here.
NAMES = {
    "flash": {"queries": "query", "keys": "key", "values": "value", "longest": ("max_q", "max_k"),
              "offsets": ("cum_seq_q", "cum_seq_k"), "dropout": "dropout_p"},
    "varlen": {"queries": "query", "keys": "key", "values": "value", "longest": ("max_q", "max_k"),
               "offsets": ("cu_seq_q", "cu_seq_k")},
}  # fmt: skip
NAMES["cudnn"] = NAMES["flash"]


def in_its_place(monkeypatch, kernel):
    # Put a function in the operator's place that keeps what it was given by name, and attends on this CPU.
    kept = {}

    def attended(signature, *args):
        kept.update(signature(*args))
        names = NAMES[kernel]
        given = {ours: kept[theirs] if isinstance(theirs, str) else kept[theirs[0]] for ours, theirs in names.items()}
        assert all(kept[theirs[0]] is kept[theirs[1]] for theirs in names.values() if not isinstance(theirs, str))
        return attention.padded(**{"dropout": 0.0, **given})

    if kernel == "varlen":
        module = importlib.import_module("torch.nn.attention.varlen")
        signature = inspect.signature(module.varlen_attn)
        monkeypatch.setattr(
            module, "varlen_attn", lambda *args: attended(lambda *them: signature.bind(*them).arguments, *args)
        )
        return kept
    name = f"_{kernel}_attention_forward"
    schema = getattr(torch.ops.aten, name).default._schema
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    monkeypatch.setattr(
        torch.ops.aten, name, lambda *args: (attended(lambda *them: dict(zip(names, them)), *args), "sums")
    )
    return kept


@pytest.mark.parametrize("kernel", sorted(attention.KERNELS))
def test_a_kernel_is_called_by_its_schema(monkeypatch, kernel):
    assert kernel in attention.why_not(kernel, CPU, torch.float32, 64), "no kernel takes fp32"
    assert attention.why_not(kernel, CPU, torch.bfloat16, 64), "and no CPU has one"
    kept = in_its_place(monkeypatch, kernel)
    drawn = torch.randn(3, 40, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = attention.KERNELS[kernel](*drawn.unbind(0), OFFSETS, 18, 0.0)
    assert torch.equal(found, attention.padded(*drawn.unbind(0), OFFSETS, 18, 0.0))
    assert kept.get("is_causal", False) is False and kept.get("return_debug_mask", False) is False
    if kernel == "cudnn":
        assert kept["compute_log_sumexp"] is True and kept["attn_bias"] is None, "its gradient needs the sums"
    assert attention.why_not(kernel, CPU, torch.bfloat16, 64) == ""
    monkeypatch.setitem(attention.KERNELS, kernel, lambda *args: attention.padded(*args) * 1.1)
    assert "wrong by" in attention.why_not(kernel, CPU, torch.bfloat16, 64)


def test_varlen_has_no_dropout():
    with pytest.raises(ValueError, match="attention_dropout=0"):
        attention.varlen(*torch.zeros(3, 4, 1, 8).unbind(0), OFFSETS, 4, 0.1)


def test_what_is_compared_is_what_runs_here(monkeypatch):
    assert attention.available(CPU, torch.float32, 64, 0.1) == ["grouped", "padded"]
    monkeypatch.setattr(attention, "why_not", lambda kernel, *_: "lacks it" if kernel == "cudnn" else "")
    assert attention.available(GPU, torch.bfloat16, 64, 0.1) == ["flash", "padded"]
    assert attention.available(GPU, torch.bfloat16, 64, 0.0) == ["flash", "varlen", "padded"]
    assert attention.choose("varlen", GPU, torch.bfloat16, 64) == "varlen"
    with pytest.raises(choices.UnavailableError, match="attention=cudnn: lacks it; use attention=auto"):
        attention.choose("cudnn", GPU, torch.bfloat16, 64)
    with pytest.raises(choices.UnavailableError, match="attention=cudnn: a kernel for GPUs alone"):
        attention.choose("cudnn", CPU, torch.bfloat16, 64)
