"""Two ranks make the same choice if only rank 1 is_limited an implementation or fails; otherwise one would hang.

The last test shows that both called the same collectives.
"""

import datetime
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import capabilities, kernels, optimizers
from benchmarks.language.pytorch import attention
from benchmarks.maskrcnn.pytorch import operators as maskrcnn
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.translation.pytorch import operators as translation

RANKS = (2,)
pytorch.TIMEOUT = datetime.timedelta(minutes=5)
ranks = pytorch.start(SimpleNamespace(precision="fp32", device="cpu"))
is_limited = ranks.rank == 1
CPU = torch.device("cpu")


def loss(rows):
    return rows + 1


def measure():
    if is_limited:
        raise OverflowError("out of resource")
    return 1e-9


def test_kernel_that_fails_on_one_rank_is_not_chosen():
    choice, notes = kernels.fastest({"plain": lambda: 1.0, "triton": measure}, CPU)
    assert choice == "plain"
    assert notes["triton"].endswith("out of resource" if is_limited else "fails on 1 other ranks")
    with pytest.raises(ValueError, match="no implementation runs on all ranks"):
        kernels.fastest({"triton": measure}, CPU)


def test_triton_is_chosen_on_all_ranks_or_none(monkeypatch):
    monkeypatch.setattr(kernels, "why_plain", lambda _: "Triton is not installed" if is_limited else "")
    operators = {"loss": kernels.Operator(loss, "", lambda *_: None, ())}
    assert kernels.choose(operators, "auto", ranks, torch.float32, {}) == {"loss": "plain"}
    operators["loss"] = operators["loss"]._replace(triton=f"{__name__}:loss")
    with pytest.raises(ValueError, match="kernels=triton"):
        kernels.choose(operators, "triton", ranks, torch.float32, {})


def test_optimizer_must_be_available_on_every_rank():
    candidates = {"plain": torch.optim.Adam}
    if not is_limited:
        candidates["fused"] = torch.optim.AdamW
    parameters, times = [torch.nn.Parameter(torch.ones(2))], {candidates["plain"]: 1.0}
    assert optimizers.choose(candidates, parameters, "auto", lambda build, _: times.get(build, 0.5))[0] == "plain"
    with pytest.raises(ValueError, match="optimizer_kernel=fused"):
        optimizers.choose(candidates, parameters, "fused")


def test_attention_and_compiler_must_be_available_on_every_rank(monkeypatch):
    monkeypatch.setattr(attention, "why_not", lambda *_: "no flash attention" if is_limited else "")
    gpu = (SimpleNamespace(type="cuda"), torch.float16, 64, ranks.rank)
    assert attention.choose("auto", *gpu) == "padded"
    with pytest.raises(ValueError, match="attention=flash: n") as error:
        attention.choose("flash", *gpu)
    assert ("not on every rank" in str(error.value)) != is_limited
    monkeypatch.setitem(capabilities.LACKS, "compile", lambda _: "no Triton" if is_limited else None)
    assert capabilities._choose("compile", "auto", "default", "none", ranks) == "none"
    with pytest.raises(ValueError, match="compile=default"):
        capabilities._choose("compile", "default", "default", "none", ranks)


def test_apex_and_torchvision_must_be_available_on_every_rank(monkeypatch):
    monkeypatch.setattr(translation, "apex_operators", lambda _: {} if is_limited else {"loss": loss})
    sizes = {"loss": {"rows": 2, "vocabulary": 8}}
    assert translation.choose("auto", sizes, ranks, torch.float32, {})[0] == {"loss": "plain"}
    monkeypatch.setattr(maskrcnn, "torchvision_operators", lambda _: {} if is_limited else {"roi_align": loss})
    config = Config(device="cpu", precision="fp32", compile="none", cuda_graph=False, kernels="torchvision")
    with pytest.raises(ValueError, match="torchvision"):
        maskrcnn.choose(config, ranks, {})


def test_both_ranks_called_the_same_collectives():
    assert pytorch.total([1.0 + ranks.rank]) == [3.0]
    pytorch.finish()
