"""The Transformer: network, step and translation against references, a run to its target, what a signal leaves."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mlperf_logging import compliance_checker

from benchmarks.common.run.mllog import Noted, log_of
from benchmarks.transformer import events, schedule
from encore import catalogue, configuration, data
from encore.results.compliance.compliance import check
from tests.conftest import Encore, evaluations, logged, only_run, quality, records
from tests.trainings import (
    SEED,
    InFramework,
    Started,
    assert_none_left,
    assert_same_run,
    evaluated,
    exported,
    result,
    resumed_as_printed,
)

RULES = Path(compliance_checker.__file__).parent


@pytest.fixture(scope="module")
def language(pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small data set."""
    folder = tmp_path_factory.mktemp("language") / "transformer"
    data.prepare("transformer", folder, data.Preparation(), pytorch_python)
    return folder


@dataclass(frozen=True)
class Reached:
    """The run that several tests look at."""

    folder: Path
    output: str

    @property
    def experiment(self) -> Path:
        return self.folder / "experiment_0"


@pytest.fixture(scope="module")
def reached(encore: Encore, language: Path, tmp_path_factory: pytest.TempPathFactory) -> Reached:
    """The small system on two ranks, to its target."""
    results = tmp_path_factory.mktemp("reached")
    done = encore("run", "transformer", "2", "--data", str(language), "--results", str(results), *SEED)
    assert done.returncode == 0, done.stdout + done.stderr
    return Reached(only_run(results), done.stdout)


def config_of(system: str, round_: str, ranks: int) -> SimpleNamespace:
    choice = catalogue.choose("transformer")
    found = catalogue.find_system(choice, system, round_)
    return SimpleNamespace(**configuration.resolve(choice, found, 1, ranks, []).plain())


# -- network, step, schedule ----------------------------------------------------------------------------


def test_network_is_that_of_pytorch_and_decodes_with_a_cache_alone_and_in_batches(in_pytorch: InFramework) -> None:
    found = result(in_pytorch("transformer_model.py"))
    assert len(found["logits and gradient"]) == 4
    assert all(max(errors) < 1e-5 for errors in found["logits and gradient"].values()), found
    assert found["cached"]["fp32"] < 1e-5
    assert found["cached"]["bf16"] < 0.1
    assert found["batched is single"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_is_that_of_a_plain_one_on_any_number_of_ranks(in_pytorch: InFramework, ranks: int) -> None:
    found = result(in_pytorch("transformer_step.py", ranks=ranks))
    for name in ("fp32", "split", "clipped"):
        assert found[name]["loss"] < 1e-5, (name, found[name])
        assert found[name]["weights"] < 1e-5, (name, found[name])
    for name in ("fp16", "bf16"):
        assert found[name]["loss"] < 0.02, (name, found[name])
    assert all(each["learnt"] > 0.3 and not each["changed by the warm-up"] for each in found.values()), found


def test_learning_rate_is_the_submitted_one() -> None:
    config = config_of("dgxa100", "v0.7", 8)
    found = [schedule.learning_rate(config, step) for step in (0, 1, 375, 750, 751, 3000)]
    # The first update has the rate 0: fairseq sets the rate of update n after n - 1 of them.
    assert found == pytest.approx([0, 1.9e-3 / 750, 0.95e-3, 1.9e-3, 1.9e-3 * (750 / 751) ** 0.5, 0.95e-3])


# -- the log --------------------------------------------------------------------------------------------

SUBMITTED = [
    pytest.param(system.round, system.system, id=f"{system.round} {system.system}")
    for system in catalogue.systems(catalogue.choose("transformer"))
    if system.kind == "submitted" and system.round != "v0.5"
]


@pytest.mark.parametrize(("round_", "system"), SUBMITTED)
def test_hyperparameters_pass_the_checker_of_their_round(round_: str, system: str) -> None:
    """The checkers' own conditions: mlperf-logging has them as Python expressions over ``v``."""
    file = {"v0.6": "training_0.6.0/transformer.yaml", "v0.7": "training_0.7.0/closed_transformer.yaml"}[round_]
    logged_events = events.hyperparameters(config_of(system, round_, 8), 8)
    rules = [entry["KEY"] for entry in yaml.safe_load((RULES / file).read_text(encoding="utf-8"))]
    named = [rule for rule in rules if rule["REQ"] == "EXACTLY_ONE"]
    assert {rule["NAME"] for rule in named} == set(logged_events)
    for rule in named:
        value = logged_events[rule["NAME"]]
        noted = value if isinstance(value, Noted) else Noted(value, {})
        conditions = rule["CHECK"] if isinstance(rule["CHECK"], list) else [rule["CHECK"]]
        for condition in conditions:
            assert eval(condition.strip(), {"v": noted._asdict()}), (rule["NAME"], noted)


def test_log_has_bleu_as_a_fraction_and_a_value_with_its_metadata(tmp_path: Path) -> None:
    log = log_of(events.WORDING, tmp_path / "result.txt", 0, "v0.7")
    log.event("max_sequence_length", Noted(64, {"method": "discard"}))
    log.eval_stop(3, {"bleu": 25.0}, {"bleu": 25.0})
    length, _, accuracy = logged(tmp_path / "result.txt")
    assert (length["value"], length["metadata"]["method"]) == (64, "discard")
    assert (accuracy["value"], accuracy["metadata"]["epoch_num"]) == (0.25, 3)


# -- a run ----------------------------------------------------------------------------------------------


def test_small_run_reaches_the_target_and_passes_the_checker(encore: Encore, reached: Reached) -> None:
    checked = encore("check", str(reached.folder))
    assert "0 errors" in checked.stdout, checked.stdout
    found = evaluations(reached.experiment / "metrics.jsonl")
    assert quality(found[-1]) >= 60.0 > quality(found[0])
    # sacreBLEU splits words at the same marks, and there are no others in this language; it has two decimals.
    assert found[-1]["sacrebleu"] == pytest.approx(quality(found[-1]), abs=6e-3)
    log = reached.folder / "result_0.txt"
    accuracies = [event["value"] for event in logged(log) if event["key"] == "eval_accuracy"]
    assert accuracies == pytest.approx([quality(each) / 100 for each in found])
    errors = [finding for finding in check(log, "0.7.0").findings if finding.severity == "error"]
    assert {finding.kind for finding in errors} <= {"small_data"}, errors


def test_every_sentence_is_translated_and_kept_with_its_reference(reached: Reached) -> None:
    lines = (reached.experiment / "translations.jsonl").read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert [each["index"] for each in found] == list(range(400))
    assert {each["epoch"] for each in found} == {len(records(reached.experiment / "metrics.jsonl", "eval"))}
    right = sum(each["hypothesis"] == each["reference"] for each in found)
    assert right > 40, "at 60 BLEU some sentences are right"
    assert all(each["bleu"] == 100 for each in found if each["hypothesis"] == each["reference"])


def test_exported_parts_translate_like_the_run(
    encore: Encore, in_pytorch: InFramework, reached: Reached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So small a model is slower on many threads.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    content = exported(encore, reached.folder, tmp_path / "exported", "torch-export")
    evaluated(encore, tmp_path / "exported", reached.folder, content, "--max-batch", "512")
    assert list(content["parts"]) == ["encoder", "decoder"]
    found = result(in_pytorch("exported_step.py", str(tmp_path / "exported" / "decoder")))
    assert found["past"]["cache"][5] == 3, "the example is from a step that has a past"
    assert found["apart"] > 0.1, "hypotheses that are all alike show nothing"
    assert found["largest"] < 1e-4


def test_stopped_in_training_and_in_decoding_and_resumed_is_an_unbroken_run(
    language: Path, reached: Reached, tmp_path: Path
) -> None:
    started = Started.run(language, tmp_path, name="transformer")
    folder = started.wait_for_step(7)  # records of 10 steps: in the second epoch
    ranks = started.ranks(folder)
    ranks[1].send_signal(signal.SIGTERM)  # one rank is told, both stop at the same step
    code, output = started.end()
    assert code == 130, output
    assert_none_left(ranks)

    resumed = Started.again(folder.parent)
    wait_for_evaluation(resumed, folder / "result.txt", 2)
    resumed.process.send_signal(signal.SIGTERM)
    code, output = resumed.end()
    assert code == 130, output
    assert len(evaluations(folder / "metrics.jsonl")) == 1, "the second evaluation was not finished"

    done = resumed_as_printed(output)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(folder, reached.experiment)


def wait_for_evaluation(run: Started, log: Path, number: int) -> None:
    """Wait until so many evaluations have begun, of all that the log has."""
    end = time.monotonic() + 240
    while log.read_text(encoding="utf-8").count('"eval_start"') < number:
        assert run.process.poll() is None, run.process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_bench_shows_every_kind(encore: Encore, language: Path) -> None:
    done = encore("bench", "transformer", "--data", str(language), "--steps", "2", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads(done.stdout)["measured"]
    assert set(measured) == {"bare", "synthetic", "real", "input", "one by one", "evaluation"}


def test_what_cannot_be_trained_is_refused(encore: Encore, language: Path, tmp_path: Path) -> None:
    where = ("--data", str(language), "--results", str(tmp_path))
    for setting, told in (
        ("heads=3", "width=64 must be a multiple of 2 * heads=6"),
        ("batch_size=39", "must hold a pair of max_length=40"),
        ("precision=tf32", "has no tf32"),
        ("compile=true", "set compile=false"),
    ):
        done = encore("run", "transformer", "1", "--set", setting, *where)
        assert done.returncode != 0
        assert told in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
