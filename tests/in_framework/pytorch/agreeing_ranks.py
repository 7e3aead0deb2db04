"""Two ranks choose alike where rank 1 alone lacks or fails something; one that chose by itself would leave the other.

The last test shows that both called the same collectives.
"""

import datetime
from types import SimpleNamespace

import pytest
import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import abilities, kernels, optimizers
from benchmarks.language.pytorch import attention
from benchmarks.maskrcnn.pytorch import operators as maskrcnn
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.translation.pytorch import operators as translation

RANKS = (2,)
pytorch.TIMEOUT = datetime.timedelta(minutes=5)
ranks = pytorch.start(SimpleNamespace(precision="fp32", device="cpu"))
lacks = ranks.rank == 1
CPU = torch.device("cpu")


def loss(rows):
    return rows + 1


def fails_here():
    if lacks:
        raise OverflowError("out of resource")
    return 1e-9


def test_a_kernel_that_fails_on_one_rank_is_none_for_any():
    chosen, words = kernels.fastest({"plain": lambda: 1.0, "triton": fails_here}, CPU)
    assert chosen == "plain", "the faster one of rank 0 ends rank 1"
    assert words["triton"].endswith("out of resource" if lacks else "fails on 1 other ranks")
    with pytest.raises(ValueError, match="no implementation runs on all ranks"):
        kernels.fastest({"triton": fails_here}, CPU)


def test_triton_is_on_every_rank_or_on_none(monkeypatch):
    monkeypatch.setattr(kernels, "why_plain", lambda _: "Triton is not installed" if lacks else "")
    operators = {"loss": kernels.Operator(loss, "", lambda *_: None, ())}
    assert kernels.choose(operators, "auto", ranks, torch.float32, {}) == {"loss": "plain"}
    operators["loss"] = operators["loss"]._replace(triton=f"{__name__}:loss")
    with pytest.raises(ValueError, match="kernels=triton"):
        kernels.choose(operators, "triton", ranks, torch.float32, {})


def test_an_optimizer_is_one_that_every_rank_has():
    candidates = {"plain": lambda each: torch.optim.Adam(each)}
    if not lacks:
        candidates["fused"] = lambda each: torch.optim.Adam(each)
    given, times = [torch.nn.Parameter(torch.ones(2))], {candidates["plain"]: 1.0}
    assert optimizers.choose(candidates, given, "auto", lambda build, _: times.get(build, 0.5))[0] == "plain"
    with pytest.raises(ValueError, match="optimizer_kernel=fused"):
        optimizers.choose(candidates, given, "fused")


def test_attention_and_compiler(monkeypatch):
    monkeypatch.setattr(attention, "why_not", lambda *_: "no flash attention" if lacks else "")
    gpu = (SimpleNamespace(type="cuda"), torch.float16, 64, ranks.rank)
    assert attention.choose("auto", *gpu) == "padded"
    with pytest.raises(ValueError, match="attention=flash: n") as refused:
        attention.choose("flash", *gpu)
    assert ("not on every rank" in str(refused.value)) != lacks
    monkeypatch.setitem(abilities.LACKS, "compile", lambda _: "no Triton" if lacks else None)
    assert abilities._choose("compile", "auto", "default", "none", ranks) == "none"
    with pytest.raises(ValueError, match="compile=default"):
        abilities._choose("compile", "default", "default", "none", ranks)


def test_apex_and_torchvision(monkeypatch):
    monkeypatch.setattr(translation, "apex_operators", lambda _: {} if lacks else {"loss": loss})
    sizes = {"loss": {"rows": 2, "vocabulary": 8}}
    assert translation.choose("auto", sizes, ranks, torch.float32, {})[0] == {"loss": "plain"}
    monkeypatch.setattr(maskrcnn, "torchvision_operators", lambda _: {} if lacks else {"roi_align": loss})
    config = Config(device="cpu", precision="fp32", compile="none", cuda_graph=False, kernels="torchvision")
    with pytest.raises(ValueError, match="torchvision"):
        maskrcnn.choose(config, ranks, {})


def test_no_rank_called_a_collective_more_than_the_other():
    assert pytorch.total([1.0 + ranks.rank]) == [3.0]
    pytorch.finish()
