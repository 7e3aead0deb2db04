"""gpt-oss-20b: the toy data set's target, its export and bench, and what is refused before a run."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.llama import tokenization
from benchmarks.llama.schedule import of_megatron
from benchmarks.llama31_8b.dataset import open_data
from encore import catalogue, configuration, paths
from tests.conftest import Encore, evaluations, logged, quality
from tests.trainings import BENCHED, benched, checked_config, config_of, exported, reached, serving
from tools import ngrams


@pytest.fixture(scope="module")
def python_text(pytorch_python: Path, toy: Callable[[str], Path]) -> Path:
    # Either benchmark reads what the other prepared.
    return toy("llama31-8b")


@pytest.fixture(scope="module")
def small_run(encore: Encore, python_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # With half of the experts on each rank.
    options = ("--set", "expert_parallelism=2")
    return reached(encore, "gpt-oss-20b", python_text, tmp_path_factory.mktemp("results"), *options)


def test_small_run_is_better_than_a_bigram_model(small_run: Path, python_text: Path, encore: Encore) -> None:
    found = quality(evaluations(small_run / "experiment_0" / "metrics.jsonl")[-1])
    target = config_of("gpt-oss-20b", "cpu", None, 2).quality_target
    text = open_data(python_text)
    held = text.test.tokens[: 100 * 128 + 1]
    assert found <= target < ngrams.loss(text.train.tokens.tolist(), held.tolist(), 2, text.vocabulary) - 0.04
    values = {event["key"]: event["value"] for event in logged(small_run / "result_0.txt")}
    assert (values["submission_benchmark"], values["expert_parallelism"]) == ("gpt_oss_20b", 2)
    assert json.loads(encore("check", str(small_run), "--json", code=None).stdout)["passed_but_for_data"]
    texts = (small_run / "experiment_0" / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(texts) == 4
    read = tokenization.read(python_text / tokenization.FILE)
    for line in map(json.loads, texts):
        assert line["text"] + line["reference"] in read.decode(held.tolist())
        assert line["likeliest"] and line["drawn"] != line["likeliest"]


def test_exported_model_predicts_alike_and_a_server_continues_a_text(
    small_run: Path, encore: Encore, python_text: Path, serving_python: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    assert exported(encore, small_run, folder, "onnx")["reached"]
    (packages,) = serving_python.parent.parent.glob("lib/python3*/site-packages")

    def continued(text: str, port: str, *options: str) -> subprocess.CompletedProcess[str]:
        words = [text, "--tokenizer", str(python_text / "tokenizer.json"), "--url", f"127.0.0.1:{port}", *options]
        command = [sys.executable, "-m", "benchmarks.llama.generate", str(folder), *words]
        environment = {**os.environ, "PYTHONPATH": f"{paths.ROOT}:{packages}"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    with serving(folder) as server:
        port = server.ports["http"]
        greedy = [continued("The list of", port, "--tokens", "12").stdout for _ in range(2)]
        assert greedy[0] == greedy[1] and greedy[0].startswith("The list of ") and len(greedy[0]) > 20
        drawn = [continued("The list of", port, "--temperature", "2", "--seed", seed).stdout for seed in "12"]
        assert drawn[0] != drawn[1]
        assert "the text has no token" in continued("", port).stderr
    gone = continued("The list of", port, "--wait", "0.5")
    assert gone.returncode == 2 and "is the server up?" in gone.stderr


def test_bench_shows_every_kind(encore: Encore, python_text: Path) -> None:
    assert benched(encore, "gpt-oss-20b", python_text) == BENCHED


FACTS = {"facts": {"vocabulary": 128256, "tokens": {"train": 10**9, "test": 10**9}}}


def test_the_learning_rate_is_megatrons() -> None:
    config = config_of("gpt-oss-20b", "reference_b200", None, 8)
    rates = [of_megatron(config, step) / 4e-4 for step in (0, 1, 128, 600_000, 1_199_872, 1_200_000)]
    # 1/128 of the base rate is what the reference's log has behind the first step.
    assert rates == pytest.approx([0, 1 / 128, 1, 0.55, 0.1, 0.1])


def test_what_cannot_fit_is_refused() -> None:
    config = checked_config("gpt-oss-20b", "reference_b200", None)
    assert config.misfits(FACTS, 8, 180e9) == []
    assert round(config.needed_memory(128256, 8) / 1e9) == 38
    whole = checked_config("gpt-oss-20b", "reference_b200", None, "recompute=false")
    ((found, _, hint),) = whole.misfits(FACTS, 8, 80e9)
    assert found.startswith("a rank needs") and "recompute=true" in hint


@pytest.mark.parametrize(
    ("settings", "ranks", "words"),
    [
        ({}, 12, "a multiple of the 8 that share the experts"),
        ({"expert_parallelism": 2, "width": 40, "inner_width": 40}, 6, "3 copies of each expert"),
    ],
)
def test_ranks_that_cannot_share_the_experts_are_refused(settings: dict[str, int], ranks: int, words: str) -> None:
    made = configuration.config_class(catalogue.choose("gpt-oss-20b").folder)(**settings)
    (misfit,) = made.misfits(FACTS, ranks, math.inf)
    assert words in " ".join(misfit)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"experts": 2}, "chosen_experts=4 must be at most experts=2"),
        ({"expert_parallelism": 5}, "expert_parallelism=5 must divide experts=32"),
        ({"width": 2884}, "multiples of 8"),
        ({"head_size": 63}, "a head of 63 values has no pairs"),
        ({"window": -1}, "window must be at least 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        configuration.config_class(catalogue.choose("gpt-oss-20b").folder)(**settings)
