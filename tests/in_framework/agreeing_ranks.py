"""Two ranks choose where rank 1 alone lacks or fails something: what each of them takes, and that none waits."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
from types import SimpleNamespace

import torch

from benchmarks.common.frameworks import pytorch
from benchmarks.common.torch import abilities, kernels, optimizers
from benchmarks.language.pytorch import attention
from benchmarks.maskrcnn.pytorch import choice as maskrcnn
from benchmarks.maskrcnn.pytorch.config import Config
from benchmarks.translation.pytorch import operators as translation

pytorch.TIMEOUT = datetime.timedelta(seconds=30)
ranks = pytorch.start(SimpleNamespace(precision="fp32", device="cpu"))
lacks = ranks.rank == 1
device = torch.device("cpu")
reported = io.StringIO()


def fails_here() -> float:
    if lacks:
        raise OverflowError("out of resource")
    return 1e-9


def example(implementation, device, dtype, **_sizes):
    return lambda: [implementation(torch.ones(3))]


def loss(rows):
    return rows + 1


kernels.why_plain = lambda _: "Triton is not installed" if lacks else ""
operators = {"loss": kernels.Operator(loss, f"{__name__}:loss", example, ({},))}


def attempt(call) -> object:
    """Return what ``call`` returns, or the words of its refusal."""
    try:
        return call()
    except (ValueError, SystemExit) as problem:
        return {"refused": str(problem)}


def optimizer(wanted: str) -> str:
    candidates = {"plain": lambda each: torch.optim.Adam(each), "fused": lambda each: torch.optim.Adam(each)}
    candidates = {"plain": candidates["plain"]} if lacks else candidates
    times = {id(candidates["plain"]): 1.0}
    given = [torch.nn.Parameter(torch.ones(2))]
    return optimizers.choose(candidates, given, wanted, lambda build, _: times.get(id(build), 0.5))[0]


def on_gpu(wanted: str) -> str:
    attention.why_no_flash = lambda *_: "no flash attention" if lacks else ""
    return attention.choose(wanted, SimpleNamespace(type="cuda"), torch.float16, 64, ranks.rank)


def compiler(wanted: str) -> str:
    abilities.LACKS["compile"] = lambda _: "no Triton" if lacks else None
    return abilities._choose("compile", wanted, "default", "none", ranks)


@contextlib.contextmanager
def by_fakes(module, **names):
    kept = {name: getattr(module, name) for name in names}
    vars(module).update(names)
    yield
    vars(module).update(kept)


def with_apex() -> object:
    sizes = {"loss": {"rows": 2, "vocabulary": 8}}
    with by_fakes(translation, apex_operators=lambda _: {} if lacks else {"loss": loss}):
        return translation.choose("auto", sizes, ranks, torch.float32, {})[0]


def with_torchvision() -> object:
    config = Config(device="cpu", precision="fp32", compile="none", cuda_graph=False, kernels="torchvision")
    with by_fakes(maskrcnn, torchvision_operators=lambda _: {} if lacks else {"roi_align": loss}):
        return maskrcnn.choose(config, ranks, {}).names


with contextlib.redirect_stderr(reported):
    found = {
        "a kernel that fails": kernels.fastest({"plain": lambda: 1.0, "triton": fails_here}, device),
        "none is left": attempt(lambda: kernels.fastest({"triton": fails_here}, device)),
        "no Triton": kernels.choose(operators, "auto", ranks, torch.float32, {"loss": {}}),
        "Triton wanted": attempt(lambda: kernels.choose(operators, "triton", ranks, torch.float32, {})),
        "no fused Adam": optimizer("auto"),
        "fused Adam wanted": attempt(lambda: optimizer("fused")),
        "no flash": on_gpu("auto"),
        "flash wanted": attempt(lambda: on_gpu("flash")),
        "no compiler": compiler("auto"),
        "compiler wanted": attempt(lambda: compiler("default")),
        "no apex": with_apex(),
        "torchvision wanted": attempt(with_torchvision),
    }
# Had the ranks called other collectives, or another number of them, this sum would be of something else.
found["sum"] = pytorch.total([1.0 + ranks.rank])
everything = [None] * ranks.size
torch.distributed.all_gather_object(everything, found)
if ranks.rank == 0:
    print(json.dumps(everything))
pytorch.finish()
