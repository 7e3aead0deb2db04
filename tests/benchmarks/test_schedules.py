"""ResNet's learning rates, computed by hand, and its submitted optimizers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mlperf_logging import compliance_checker

from benchmarks.bert import schedule as bert_schedule
from benchmarks.bert_squad import schedule as squad_schedule
from benchmarks.common.run.mllog import Noted
from benchmarks.dlrm import schedule as dlrm_schedule
from benchmarks.gnmt import mlperf as gnmt_mlperf
from benchmarks.gnmt import schedule as gnmt_schedule
from benchmarks.maskrcnn import schedule as maskrcnn_schedule
from benchmarks.resnet import schedule
from benchmarks.resnet.config import Hyperparameters
from benchmarks.ssd import schedule as ssd_schedule
from benchmarks.transformer import mlperf as transformer_mlperf
from benchmarks.transformer import schedule as transformer_schedule
from encore import catalogue, paths
from tests.trainings import config_of

FOLDER = paths.BENCHMARKS / "resnet" / "systems"
SYSTEMS = [
    system for system in map(catalogue.read_toml, sorted(FOLDER.glob("*.toml")))
    if system["kind"] == "submitted" and system["round"] <= "v0.7"
]  # fmt: skip


def config(**changes: Any) -> Hyperparameters:
    values = {
        "schedule": "pow2",
        "learning_rate": 8.0,
        "end_learning_rate": 0.5,
        "warmup_epochs": 2.0,
        "epochs": 10,
        "decay_epochs": (4, 6),
        "decay_factor": 0.1,
        "eval_period": 4,
        "eval_offset": 0,
    }
    return Hyperparameters(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({}, {0: 0.4, 9: 4.0, 18: 7.6, 19: 8.0, 59: 0.5 + 7.5 * 0.25, 99: 0.5, 120: 0.5}),
        ({"warmup_epochs": 0}, {0: 0.5 + 7.5 * 0.99**2}),
        ({"schedule": "step"}, {0: 0.4, 9: 4.0, 39: 8.0, 40: 0.8, 60: 0.08, 99: 0.08}),
        ({"schedule": "step", "warmup_epochs": 0}, {0: 8.0}),
    ],
)
def test_rates_of_steps(changes: dict[str, Any], rates: dict[int, float]) -> None:
    assert {step: schedule.learning_rate(config(**changes), step, 10) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system["system"] + system["round"])
def test_systems_have_the_optimizer_that_was_submitted(system: dict[str, Any]) -> None:
    # set_wd_mult of MXNet's SGD and of SGDwFASTLARS; SoftmaxOutput sums over the batch; only v0.7 has warm-up steps
    values, defaults = system["config"], Hyperparameters()
    without = {"sgd": ["beta", "bias"], "lars": ["gamma", "beta"]}[values["optimizer"]]
    assert sorted(values.get("no_weight_decay", defaults.no_weight_decay)) == sorted(without)
    assert values["loss_scale"] == values["batch_size"]
    assert (values.get("warm_up_steps", defaults.warm_up_steps) > 0) == (system["round"] == "v0.7")


def test_learning_rate_of_bert() -> None:
    # The first step of LinearWarmupPolyDecayScheduler is 1; the warm-up began at -76.
    config = config_of("bert", "dgxa100_n256", None, 8, nodes=256)
    rates = [bert_schedule.learning_rate(config, number - 1) / 0.00288293 for number in (1, 210, 211, 560)]
    assert rates == pytest.approx([77 / 287, 286 / 287, 1 - 211 / 560, 0])
    config = config_of("bert", "dgxa100", None, 8)
    assert bert_schedule.learning_rate(config, 0) == pytest.approx(3.5e-4 * (1 - 1 / 13700))


def test_evaluations_of_bert() -> None:
    timeline = bert_schedule.timeline(config_of("bert", "dgxa100", None, 8), 8)
    samples = [step * 256 for step in range(1, timeline.steps + 1) if timeline.evaluates_after(step)]
    assert samples[:3] == [3000064, 3500032, 3507200], "first train_samples of its log, last its max_steps"
    assert timeline.steps == 13700
    assert bert_schedule.timeline(config_of("bert", "dgx1", None, 8), 8).steps == 13889


def test_learning_rate_of_bert_squad() -> None:
    config = config_of("bert-squad", "dgxa100-80g", None, 8)
    rates = [squad_schedule.learning_rate(config, step, 100) / 4.6e-5 for step in (0, 9, 19, 20, 59, 99)]
    assert rates == pytest.approx([0.05, 0.5, 1, 79 / 80, 0.5, 0])


def test_learning_rate_of_dlrm() -> None:
    config = config_of("dlrm", "dgxa100", "v0.7", 8)
    rates = [dlrm_schedule.learning_rate(config, step) for step in (0, 1374, 2749, 49314, 49315, 63200, 77086, 90000)]
    # LearningRateScheduler in NVIDIA's code counts the first step as 1.
    assert rates == pytest.approx([24 / 2750, 12, 24, 24, 24 * (27771 / 27772) ** 2, 6, 0, 0])


def test_learning_rate_of_ssd() -> None:
    config = config_of("ssd", "dgx1", "v0.7", 8)
    assert ssd_schedule.base_rate(config, 8) == pytest.approx(0.0875), "opt_base_learning_rate of its logs"
    rates = [ssd_schedule.learning_rate(config, step, 8, 123) for step in (0, 1, 325, 650, 5411, 5412, 6765)]
    assert rates == pytest.approx([0, 0.0875 / 650, 0.04375, 0.0875, 0.0875, 0.00875, 0.000875])
    large = config_of("ssd", "dgx1_n30", "v0.6", 240)
    assert ssd_schedule.base_rate(large, 240) == pytest.approx(0.1625)
    assert ssd_schedule.boundaries(large, 240, 70) == [3047, 3809]


@pytest.mark.parametrize(
    ("settings", "steps", "epochs"),
    [
        # Steps of 32 images, as v0.5 and v0.6 count, and the end
        (("eval_steps=[20, 41]",), [40, 82, 124], [1, 2, 2]),
        (("eval_epochs=[1]",), [62, 124], [1, 2]),
    ],
)
def test_evaluations_of_ssd(settings: tuple[str, ...], steps: list[int], epochs: list[int]) -> None:
    config = config_of("ssd", "cpu", None, 1, "epochs=2", "batch_size=16", "checkpoint_interval=1", *settings)
    timeline = ssd_schedule.timeline(config, 1, 62)
    assert [step for step in range(1, 125) if timeline.evaluates_after(step)] == steps
    assert [step for step in range(1, 125) if timeline.checkpoints_after(step)] == [62, 124]
    assert [timeline.epoch_num(step) for step in steps] == epochs
    assert timeline.evaluates_inside_epochs == (len(steps) == 3)


def test_learning_rates_of_mask_rcnn() -> None:
    config = config_of("maskrcnn", "dgxa100", "v0.7", 8)
    # WarmupMultiStepLR: 0.08 - (800 - step) * 0.0001, then tenths after 18,000 and 24,000 steps.
    weights = {0: 0.0, 400: 0.04, 799: 0.0799, 800: 0.08, 17999: 0.08, 18000: 0.008, 24000: 0.0008}
    # From biases the same is subtracted, but twice the base value is the start.
    biases = {0: 0.08, 400: 0.12, 799: 0.1599, 800: 0.16, 17999: 0.16, 18000: 0.016, 24000: 0.0016}
    for step in weights:
        assert maskrcnn_schedule.rates(config, step) == pytest.approx((weights[step], biases[step]))
    default = SimpleNamespace(**{**vars(config), "warmup_factor": 0.0})
    for step, factor in ((0, 1 / 3), (400, 2 / 3), (800, 1)):
        assert maskrcnn_schedule.rates(default, step) == pytest.approx((0.08 * factor, 0.16 * factor))


RULES = Path(compliance_checker.__file__).parent
LOG_KEYS = {"gnmt": gnmt_mlperf, "transformer": transformer_mlperf}


def test_learning_rates_of_translation() -> None:
    config = config_of("gnmt", "dgxa100", "v0.7", 8)
    steps = (1, 100, 200, 201, 4053, 4054, 4559, 4560, 5065, 5066, 5571, 5572, 100_000)
    # Its WarmupMultiStepLR counts the first step as 1.
    rates = [gnmt_schedule.learning_rate(config, step - 1) / 2.875e-3 for step in steps]
    first = 0.01 ** (199 / 200)
    assert rates == pytest.approx([first, 0.1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625])
    config = config_of("transformer", "dgxa100", "v0.7", 8)
    rates = [transformer_schedule.learning_rate(config, step) for step in (0, 1, 375, 750, 751, 3000)]
    # The first update has the rate 0: fairseq sets the rate of update n after n - 1 updates.
    assert rates == pytest.approx([0, 1.9e-3 / 750, 0.95e-3, 1.9e-3, 1.9e-3 * (750 / 751) ** 0.5, 0.95e-3])


SUBMITTED = [
    pytest.param(name, system.round, system.system, id=f"{name} {system.round} {system.system}")
    for name in LOG_KEYS
    for system in catalogue.systems(catalogue.choose(name))
    if system.kind == "submitted" and system.round != "v0.5"
]


@pytest.mark.parametrize(("name", "round_name", "system"), SUBMITTED)
def test_hyperparameters_pass_the_checker_of_their_round(name: str, round_name: str, system: str) -> None:
    # mlperf-logging has the conditions as Python expressions over ``v``
    file = {"v0.6": f"training_0.6.0/{name}.yaml", "v0.7": f"training_0.7.0/closed_{name}.yaml"}[round_name]
    config = config_of(name, system, round_name, 8)
    events = LOG_KEYS[name].hyperparameters(config, 8)
    entries = [entry["KEY"] for entry in yaml.safe_load((RULES / file).read_text(encoding="utf-8"))]
    rules = [entry for entry in entries if entry["REQ"] == "EXACTLY_ONE"]
    adam = {f"opt_{part}" for part in ("name", "adam_beta_1", "adam_beta_2", "adam_epsilon")}
    assert set(events) | adam == {rule["NAME"] for rule in rules} | adam
    assert events["global_batch_size"] == 8 * config.batch_size
    for rule in rules:
        value = events[rule["NAME"]]
        noted = value if isinstance(value, Noted) else Noted(value, {})
        conditions = rule.get("CHECK", [])
        for condition in conditions if isinstance(conditions, list) else [conditions]:
            assert eval(condition.strip(), {"v": noted._asdict()}), (rule["NAME"], noted)
