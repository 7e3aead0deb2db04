"""Attention kernels for GPUs, called by the schemas that their operators have in this PyTorch."""

import importlib
import inspect
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common.run import choices
from benchmarks.language.pytorch import attention
from tests.in_framework.waves import waves

CPU, GPU = torch.device("cpu"), SimpleNamespace(type="cuda")
OFFSETS = torch.tensor([0, 5, 22, 22, 40], dtype=torch.int32)


def record_call(monkeypatch, kernel):
    # Replace the operator by a function that notes its arguments by name and attends on this CPU
    arguments = {}

    def attend(names, *values):
        arguments.update(zip(names, values))
        given = [arguments[name] for name in ("query", "key", "value", OFFSET_NAMES[kernel], "max_q")]
        assert arguments[OFFSET_NAMES[kernel].replace("_q", "_k")] is given[3] and arguments["max_k"] is given[4]
        return attention.padded(*given, arguments.get("dropout_p", 0.0))

    if kernel == "varlen":
        module = importlib.import_module("torch.nn.attention.varlen")
        names = list(inspect.signature(module.varlen_attn).parameters)
        monkeypatch.setattr(module, "varlen_attn", partial(attend, names))
    else:
        name = f"_{kernel}_attention_forward"
        schema = getattr(torch.ops.aten, name).default._schema
        names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        monkeypatch.setattr(torch.ops.aten, name, lambda *values: (attend(names, *values), "sums"))
    return arguments


OFFSET_NAMES = {"flash": "cum_seq_q", "varlen": "cu_seq_q"}


@pytest.mark.parametrize("kernel", sorted(attention.KERNELS))
def test_a_kernel_is_called_by_its_schema(monkeypatch, kernel):
    assert kernel in attention.why_not(kernel, CPU, torch.float32, 64), "no kernel takes fp32"
    assert attention.why_not(kernel, CPU, torch.bfloat16, 64), "and no CPU has one"
    arguments = record_call(monkeypatch, kernel)
    qkv = torch.from_numpy(waves(3, 40, 2, 8)).bfloat16().unbind(0)
    attn_out = attention.KERNELS[kernel](*qkv, OFFSETS, 18, 0.0)
    assert torch.equal(attn_out, attention.padded(*qkv, OFFSETS, 18, 0.0))
    assert not arguments.get("is_causal") and not arguments.get("return_debug_mask")
    assert attention.why_not(kernel, CPU, torch.bfloat16, 64) == ""
    monkeypatch.setitem(attention.KERNELS, kernel, lambda *args: attention.padded(*args) * 1.1)
    assert "wrong by" in attention.why_not(kernel, CPU, torch.bfloat16, 64)


def test_varlen_has_no_dropout():
    with pytest.raises(ValueError, match="attention_dropout=0"):
        attention.varlen(*torch.zeros(3, 4, 1, 8).unbind(0), OFFSETS, 4, 0.1)


def test_available_and_chosen_kernels(monkeypatch):
    assert attention.available(CPU, torch.float32, 64, 0.1) == ["grouped", "padded"]
    monkeypatch.setattr(attention, "why_not", lambda kernel, *_: "lacks it" if kernel == "flash" else "")
    assert attention.available(GPU, torch.bfloat16, 64, 0.1) == ["padded"]
    assert attention.available(GPU, torch.bfloat16, 64, 0.0) == ["varlen", "padded"]
    assert attention.choose("varlen", GPU, torch.bfloat16, 64) == "varlen"
    with pytest.raises(choices.UnavailableError, match="attention=flash: lacks it; use attention=auto"):
        attention.choose("flash", GPU, torch.bfloat16, 64)
    with pytest.raises(choices.UnavailableError, match="attention=varlen: the kernel runs on GPUs only"):
        attention.choose("varlen", CPU, torch.bfloat16, 64)
