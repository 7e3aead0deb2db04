"""What all PyTorch implementations share: ranks, sums, checkpoints, the choice of an optimizer."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from encore import paths
from tests.trainings import InFramework, result


@pytest.fixture(scope="module")
def foundation(in_pytorch: InFramework, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """What tests/in_framework/torch_foundation.py finds on so many ranks."""
    folder = tmp_path_factory.mktemp("foundation")

    @cache
    def found(ranks: int) -> Any:
        (folder / str(ranks)).mkdir(exist_ok=True)
        return result(in_pytorch("torch_foundation.py", str(folder / str(ranks)), ranks=ranks))

    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_foundation(foundation: Callable[[int], Any], ranks: int) -> None:
    found = foundation(ranks)
    assert found["size"] == found["local size"] == ranks
    rank_sum = sum(range(ranks))
    assert found["lagged sums"] == [
        None,
        None,
        *([float(ranks * step), float(step == 2)] for step in range(4)),
    ]
    assert found["total"] == [ranks + rank_sum]
    assert abs(found["weights apart"]) < 1e-6
    assert found["summed gradient"] == pytest.approx(sum(range(1, ranks + 1)))
    assert found["cleared"] == 0
    off, on = ({"tf32": dict.fromkeys(("matmul", "cudnn"), each)} for each in (False, True))
    assert found["arithmetic"] == [{}, off, on, off], "a CPU; fp32 and tf32 on a GPU that has it; and on one without"
    assert found["found at first"] == {}
    for check in ("same weights", "own", "same random numbers"):
        assert found[check] is True, check
    assert found["step found again"] == 13


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_group_is_connected_by_each_kind_of_collective(foundation: Callable[[int], Any], ranks: int) -> None:
    """That of all ranks, that of what no graph holds, and one of rank 0's own."""
    groups = {"all_reduce": [0, 1, 2], "all_to_all_single": [0, 1, 2]}
    assert foundation(ranks)["connected"] == (groups if ranks > 1 else {})


@pytest.mark.parametrize("ranks", [1, 2])
def test_graphs_are_let_go_before_the_group(foundation: Callable[[int], Any], ranks: int) -> None:
    """NCCL waits without end for graphs that hold kernels of a communicator which is destroyed."""
    ended = ["barrier", "destroy"] if ranks > 1 else []
    assert foundation(ranks)["end"] == ["synchronize", "reset", "reset", "synchronize", *ended]


def test_the_first_rank_of_a_node_compiles_first(foundation: Callable[[int], Any]) -> None:
    first, others = ["0 begins", "0 ends"], ["1 begins", "1 ends", "2 begins", "2 ends"]
    whole, killed = foundation(1)["turns"]
    assert (whole[:2], sorted(whole[2:])) == (first, others)
    assert (killed[:1], sorted(killed[1:])) == (first[:1], others), "and nobody waits for one that was killed"


def test_the_watchdog_of_nccl_is_switched_off_by_the_name_of_the_release(foundation: Callable[[int], Any]) -> None:
    names = ["NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"]
    assert foundation(1)["old and new name"] == names


def test_caches_of_compilers_are_of_the_node_and_of_all_its_ranks(foundation: Callable[[int], Any]) -> None:
    default, given = foundation(1)["caches"]
    folder = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
    assert default == {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    assert given == {"TORCHINDUCTOR_CACHE_DIR": "/cache", "TRITON_CACHE_DIR": "/cache/triton"}


def test_optimizer_is_chosen_by_asking_and_measuring(foundation: Callable[[int], Any]) -> None:
    found = foundation(1)
    assert found["candidates"] == ["fused", "plain"]
    assert found["chosen"] in ("fused", "plain")
    assert found["apex measured best"] == "apex"
    assert found["fused measured best"] == "fused"
    assert "use auto or one of ['fused', 'plain']" in found["refusal"]


def test_implementations_of_an_optimizer_are_compared(in_pytorch: InFramework) -> None:
    same, different = in_pytorch("compare_optimizers.py").splitlines()[-2:]
    assert same.startswith("fused, plain on c")
    assert different == "['apex']"


def test_an_images_choice_of_tf32_is_not_that_of_the_training(pytorch_python: Path) -> None:
    """NGC's images set the variable, and `precision` decides; a `train.py` imports its package before PyTorch."""
    program = "import benchmarks.ncf.pytorch, torch; print(torch.get_float32_matmul_precision())"
    variables = {"PYTHONPATH": str(paths.ROOT), "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [pytorch_python, "-c", program], env=variables, capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout == "highest\n"


def test_ranks_choose_alike_where_one_alone_lacks_something(in_pytorch: InFramework) -> None:
    """Rank 1 lacks or fails each thing; a rank that chose by itself would end or leave the other in a collective."""
    first, second = result(in_pytorch("agreeing_ranks.py", ranks=2))
    wanted = {
        "no Triton": {"loss": "plain"}, "no fused Adam": "plain", "no flash": "padded", "no compiler": "none",
        "no apex": {"loss": "plain"}, "sum": [3.0],
    }  # fmt: skip
    for found in (first, second):
        assert {name: found[name] for name in wanted} == wanted
        assert found["a kernel that fails"][0] == "plain", "the faster one of rank 0 ends rank 1"
        refused = {name for name, each in found.items() if isinstance(each, dict) and "refused" in each}
        assert refused == {
            "none is left", "Triton wanted", "fused Adam wanted", "flash wanted", "compiler wanted",
            "torchvision wanted",
        }  # fmt: skip
    assert first["a kernel that fails"][1]["triton"].endswith("fails on 1 other ranks")
    assert first["flash wanted"]["refused"].startswith("attention=flash: not on every rank")
