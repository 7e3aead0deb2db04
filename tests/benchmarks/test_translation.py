"""GNMT and the Transformer: rates and logs as submitted, runs to their target, what a signal leaves, exports."""

import json
import signal
from pathlib import Path

import pytest
import yaml
from mlperf_logging import compliance_checker

from benchmarks.common.run.mllog import Noted
from benchmarks.gnmt import events as gnmt_events
from benchmarks.transformer import events as transformer_events
from encore import catalogue, configuration, data
from encore.results.compliance.compliance import check
from tests.conftest import Encore, evaluations, inside, logged, losses, quality
from tests.trainings import (
    BENCHED,
    SEED,
    BareRuns,
    Started,
    assert_none_left,
    assert_resumed,
    benched,
    config_of,
    evaluated,
    exported,
    reached,
    result,
    steps_so_far,
    wait_until,
    write_small_config,
)

RULES = Path(compliance_checker.__file__).parent
EVENTS = {"gnmt": gnmt_events, "transformer": transformer_events}


# -- as submitted ---------------------------------------------------------------------------------------


def test_learning_rates_are_the_submitted_ones() -> None:
    config = config_of("gnmt", "dgxa100", "v0.7", 8)
    steps = (1, 100, 200, 201, 4053, 4054, 4559, 4560, 5065, 5066, 5571, 5572, 100_000)
    # Its WarmupMultiStepLR counts the first step as 1.
    found = [gnmt_events.learning_rate(config, step - 1) / 2.875e-3 for step in steps]
    first = 0.01 ** (199 / 200)
    assert found == pytest.approx([first, 0.1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625])
    config = config_of("transformer", "dgxa100", "v0.7", 8)
    found = [transformer_events.learning_rate(config, step) for step in (0, 1, 375, 750, 751, 3000)]
    # The first update has the rate 0: fairseq sets the rate of update n after n - 1 of them.
    assert found == pytest.approx([0, 1.9e-3 / 750, 0.95e-3, 1.9e-3, 1.9e-3 * (750 / 751) ** 0.5, 0.95e-3])


SUBMITTED = [
    pytest.param(name, system.round, system.system, id=f"{name} {system.round} {system.system}")
    for name in EVENTS
    for system in catalogue.systems(catalogue.choose(name))
    if system.kind == "submitted" and system.round != "v0.5"
]


@pytest.mark.parametrize(("name", "round_", "system"), SUBMITTED)
def test_hyperparameters_pass_the_checker_of_their_round(name: str, round_: str, system: str) -> None:
    # The checkers' own conditions: mlperf-logging has them as Python expressions over ``v``.
    file = {"v0.6": f"training_0.6.0/{name}.yaml", "v0.7": f"training_0.7.0/closed_{name}.yaml"}[round_]
    config = config_of(name, system, round_, 8)
    events = EVENTS[name].hyperparameters(config, 8)
    rules = [entry["KEY"] for entry in yaml.safe_load((RULES / file).read_text(encoding="utf-8"))]
    named = [rule for rule in rules if rule["REQ"] == "EXACTLY_ONE"]
    adam = {f"opt_{part}" for part in ("name", "adam_beta_1", "adam_beta_2", "adam_epsilon")}
    assert set(events) | adam == {rule["NAME"] for rule in named} | adam
    assert events["global_batch_size"] == 8 * config.batch_size
    for rule in named:
        value = events[rule["NAME"]]
        noted = value if isinstance(value, Noted) else Noted(value, {})
        conditions = rule.get("CHECK", [])
        for condition in conditions if isinstance(conditions, list) else [conditions]:
            assert eval(condition.strip(), {"v": noted._asdict()}), (rule["NAME"], noted)


# -- runs to their target -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gnmt", "transformer"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def language(name: str, pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The toy data set.
    folder = tmp_path_factory.mktemp("language") / name
    data.prepare(name, folder, data.Preparation(), pytorch_python)
    return folder


@pytest.fixture(scope="module", name="reached")
def run_to_target(name: str, encore: Encore, language: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # The small system on two ranks, to its target.
    return reached(encore, name, language, tmp_path_factory.mktemp("reached"), seed=SEED[1])


def test_a_small_run_reaches_the_target_and_passes_the_checker(name: str, encore: Encore, reached: Path) -> None:
    assert "0 errors" in encore("check", str(reached)).stdout
    found = evaluations(reached / "experiment_0" / "metrics.jsonl")
    assert quality(found[-1]) >= 60.0 > quality(found[0])
    if name == "transformer":
        # sacreBLEU splits words at the same marks, and there are no others in this language; it has two decimals.
        assert found[-1]["sacrebleu"] == pytest.approx(quality(found[-1]), abs=6e-3)
    log = logged(reached / "result_0.txt")
    # v0.7 logs BLEU as a share of 1.
    shares = [event["value"] for event in log if event["key"] == "eval_accuracy"]
    assert shares == pytest.approx([quality(each) / 100 for each in found])
    assert {event["key"]: event["value"] for event in log}["eval_samples"] == 400
    texts = [json.loads(line) for line in (reached / "experiment_0" / "translations.jsonl").open(encoding="utf-8")]
    assert [(each["index"], each["epoch"]) for each in texts] == [(index, len(found)) for index in range(400)]
    right = [each["bleu"] for each in texts if each["hypothesis"] == each["reference"]]
    assert len(right) > 40 and set(right) == {100}


def test_exported_parts_translate_like_the_run(
    name: str,
    encore: Encore,
    reached: Path,
    pytorch_python: Path,
    serving_python: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So small a model is slower on many threads.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    format_name, place = {"gnmt": ("onnx", "serving"), "transformer": ("torch-export", "pytorch")}[name]
    content = exported(encore, reached, tmp_path / "exported", format_name)
    if name == "transformer":
        evaluated(encore, tmp_path / "exported", reached, content, "--max-batch-size", "512")
    assert list(content["parts"]) == ["encoder", "decoder"]
    found = result(inside(place, 1, "exported_step.py", str(tmp_path / "exported" / "decoder")))
    assert found["apart"] > 0.1, "hypotheses that are all alike show nothing"
    assert found["largest"] < 1e-4


def test_a_bench_shows_every_kind(name: str, encore: Encore, language: Path) -> None:
    small = {"gnmt": ("width=16", "layers=3", "batch_size=64", "beam_size=2", "max_length_test=20")}.get(name, ())
    assert benched(encore, name, language, *small) == {*BENCHED, "one by one"}


@pytest.mark.parametrize("name", ["transformer"], indirect=True)
def test_a_run_stopped_in_training_and_in_decoding_and_resumed_is_an_uninterrupted_one(
    name: str, language: Path, reached: Path, tmp_path: Path
) -> None:
    started = Started.run(language, tmp_path, name=name)
    folder = started.wait_for_step(7)  # records of 10 steps: in the second epoch
    ranks = started.ranks(folder)
    ranks[1].send_signal(signal.SIGTERM)  # both stop at the same step
    code, output = started.end()
    assert code == 130, output
    assert_none_left(ranks)

    def stopped_at(event: str) -> None:
        # Resume it, and stop it at the second event of a kind
        resumed = Started.again(folder.parent)

        def is_there() -> bool:
            assert resumed.process.poll() is None, resumed.process.communicate()[0]
            return (folder / "result.txt").read_text(encoding="utf-8").count(f'"{event}"') == 2

        wait_until(is_there, f"the second {event}")
        resumed.process.send_signal(signal.SIGTERM)
        resumed.ended(130)

    stopped_at("eval_start")
    assert len(evaluations(folder / "metrics.jsonl")) == 1, "the second evaluation was not finished"
    stopped_at("eval_stop")
    whole = reached / "experiment_0" / "metrics.jsonl"
    found = losses(folder / "metrics.jsonl")
    assert found == losses(whole)[: len(found)]
    assert evaluations(folder / "metrics.jsonl") == evaluations(whole)[:2]


# -- GNMT on any number of ranks ------------------------------------------------------------------------

SHORT = ("epochs=2", "quality_target=100.0", "width=16", "layers=3", "max_length_train=14", "log_interval=1",
         "warmup_steps=5", "beam_size=2", "eval_batch_size=4", "max_length_test=20", "dropout=0.0")  # fmt: skip
GLOBAL_BATCH = 192
# Less than an epoch has.
STEPS = 20


def write_config(path: Path, ranks: int, *settings: str) -> Path:
    # config.json of the small system with a fixed seed; a single rank logs in the dialect of v0.6.
    size = f"batch_size={GLOBAL_BATCH // ranks}"
    return write_small_config(path, "gnmt", ranks, (*SHORT, size, *settings), "v0.6" if ranks == 1 else "v0.7")


@pytest.fixture(scope="module")
def runs(language: Path, pytorch_python: Path, tmp_path_factory: pytest.TempPathFactory) -> BareRuns:
    # GNMT's trainings.
    return BareRuns("benchmarks.gnmt.pytorch.train", pytorch_python, language, write_config, tmp_path_factory)


gnmt_alone = pytest.mark.parametrize("name", ["gnmt"], indirect=True)


@gnmt_alone
def test_two_ranks_train_like_one(runs: BareRuns) -> None:
    one, two = (runs.uninterrupted(ranks) for ranks in (1, 2))
    first, second = (losses(output / "metrics.jsonl") for output in (one, two))
    assert len(first) == len(second) > 2 * STEPS
    # The same pairs and weights: sums in another order are the only difference, and training lets it grow.
    assert second[:STEPS] == pytest.approx(first[:STEPS], abs=1e-4)
    assert second == pytest.approx(first, abs=5e-3)
    texts = [(output / "translations.jsonl").read_text(encoding="utf-8").splitlines() for output in (one, two)]
    assert [len(each) for each in texts] == [400, 400]
    assert sum(a == b for a, b in zip(*texts, strict=True)) > 380, "of so small a network, by errors in the last bits"
    findings = check(one / "result.txt", "0.6.0").findings
    assert [each.found for each in findings if "opt_" in each.expected or "max_seq" in each.expected] == []


@gnmt_alone
def test_ranks_stopped_in_training_and_in_evaluation_and_resumed_are_uninterrupted_ones(
    runs: BareRuns, tmp_path: Path
) -> None:
    expected, output = runs.uninterrupted(2), tmp_path / "stopped"
    metrics, log = output / "metrics.jsonl", output / "result.txt"
    # An evaluation has more batches than a signal needs to come within it.
    for once in (
        lambda: steps_so_far(metrics) >= STEPS // 2,
        lambda: "eval_start" in log.read_text(encoding="utf-8"),
    ):
        runs.stop(output, 2, once=once)
        assert evaluations(metrics) == [], "it was stopped before the first evaluation was over"
    assert len(losses(metrics)) == len(losses(expected / "metrics.jsonl")) // 2
    assert_resumed(runs.end(output, 2), expected)


# -- what is refused ------------------------------------------------------------------------------------


@gnmt_alone
def test_too_large_a_batch_is_refused(runs: BareRuns, tmp_path: Path) -> None:
    words = runs.refused(tmp_path / "run", 2, "batch_size=8000")
    assert "set a smaller batch_size, take fewer ranks, or more data" in words


@pytest.mark.parametrize(
    ("benchmark", "setting", "found"),
    [
        ("transformer", "heads=3", "width=64 must be a multiple of 2 * heads=6"),
        ("transformer", "batch_size=39", "must hold a pair of max_length=40"),
        ("transformer", "precision=tf32", "has no tf32"),
        ("transformer", "compile=true", "set compile=false"),
        ("transformer", "relu_dropout=1.0", "relu_dropout must be at least 0 and below 1"),
        ("gnmt", "beta1=1.0", "beta1 and beta2 must be in 0..1"),
        ("gnmt", "loss_scale=10000.0", "loss_scale must not be above loss_scale_limit"),
        ("gnmt", "layers=1", "layers"),
    ],
)
def test_configurations_that_cannot_work_are_refused(benchmark: str, setting: str, found: str) -> None:
    choice = catalogue.choose(benchmark)
    with pytest.raises(Exception, match=found.replace("*", r"\*")):
        configuration.resolve(choice, catalogue.find_system(choice, "cpu", None), 1, 1, [setting])
