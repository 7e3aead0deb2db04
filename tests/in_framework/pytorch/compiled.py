"""What torch.compile has compiled in one process is there in another, whose caches are empty."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import torch

from benchmarks.common.frameworks import pytorch

RANKS = SimpleNamespace(rank=0, local_rank=0)
PROGRAM = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from benchmarks.common.frameworks import pytorch
torch.manual_seed(0)
ranks, path = SimpleNamespace(rank=0, local_rank=0), Path(sys.argv[1])
pytorch.save_compiled(path.with_name("unused"), ranks)
pytorch.load_compiled(path, ranks)
given = torch.randn(64, 64, requires_grad=True)
found = torch.compile(lambda x: torch.nn.functional.gelu(x @ x.t()).softmax(-1).sum())(given)
found.backward()
pytorch.save_compiled(path, SimpleNamespace(rank=1, local_rank=1))
written = path.exists()
pytorch.save_compiled(path, ranks)
counted = torch._dynamo.utils.counters["inductor"]
print(json.dumps([counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"], float(given.grad.sum()), written]))
"""


def compiled_in(tmp_path, caches):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / caches), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "compiled.bin")]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_compiles_nothing_again(tmp_path):
    hits, misses, gradient, written = compiled_in(tmp_path, "one")
    assert (hits, written) == (0, False) and misses > 0, "only rank 0 writes"
    assert not (tmp_path / "unused").exists(), "what never compiled writes nothing"
    again = compiled_in(tmp_path, "other")
    assert again[:2] == [misses, 0] and again[2] == gradient
    assert again[3], "and is kept for the next one"


def test_a_cache_that_cannot_be_read_or_written_fails_no_run(tmp_path, monkeypatch, capsys):
    for damaged in (b"", b"no kernels"):
        (tmp_path / "compiled.bin").write_bytes(damaged)
        pytorch.load_compiled(tmp_path / "compiled.bin", RANKS)

    def fail(*arguments):
        raise OSError("no space left")

    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", SimpleNamespace())
    for name in ("load_cache_artifacts", "save_cache_artifacts"):
        monkeypatch.setattr(torch.compiler, name, fail)
    pytorch.load_compiled(tmp_path / "compiled.bin", RANKS)
    assert "cannot be loaded: OSError('no space left')" in capsys.readouterr().err
    pytorch.save_compiled(tmp_path / "compiled.bin", RANKS)
    assert "cannot be kept: OSError('no space left')" in capsys.readouterr().err


def test_an_older_pytorch_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.delattr(torch, "compiler")
    pytorch.load_compiled(tmp_path / "compiled.bin", RANKS)
    pytorch.save_compiled(tmp_path / "compiled.bin", RANKS)
    assert not list(tmp_path.iterdir())
