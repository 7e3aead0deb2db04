"""Code compiled by torch.compile in one process is loaded by another with empty caches."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import torch

from benchmarks.common.frameworks import pytorch

LONG = True
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
x = torch.randn(64, 64, requires_grad=True)
torch.compile(lambda x: torch.nn.functional.gelu(x @ x.t()).softmax(-1).sum())(x).backward()
pytorch.save_compiled(path, SimpleNamespace(rank=1, local_rank=1))
exists = path.exists()
pytorch.save_compiled(path, ranks)
counters = torch._dynamo.utils.counters["inductor"]
print(json.dumps([counters["fxgraph_cache_hit"], counters["fxgraph_cache_miss"], float(x.grad.sum()), exists]))
"""


def run_program(tmp_path, cache):
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "compiled.bin")]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout
    return json.loads(output.splitlines()[-1])


def test_second_process_compiles_nothing(tmp_path):
    hits, misses, gradient, exists = run_program(tmp_path, "first")
    assert (hits, exists) == (0, False) and misses > 0, "only rank 0 writes the file"
    assert not (tmp_path / "unused").exists(), "nothing was compiled before the first call"
    assert run_program(tmp_path, "second") == [misses, 0, gradient, True]


def test_unreadable_cache_is_reported(tmp_path, monkeypatch, capsys):
    path = tmp_path / "compiled.bin"
    path.write_bytes(b"no kernels")
    pytorch.load_compiled(path, RANKS)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", mock.Mock(side_effect=OSError("no space left")))
    pytorch.load_compiled(path, RANKS)
    assert "cannot be loaded: OSError('no space left')" in capsys.readouterr().err
