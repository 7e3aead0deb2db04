"""ResNet's learning rates, computed by hand, and its submitted optimizers."""

from typing import Any

import pytest

from benchmarks.resnet import events
from benchmarks.resnet.config import Hyperparameters
from encore import catalogue, paths

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
    assert {step: events.learning_rate(config(**changes), step, 10) for step in rates} == pytest.approx(rates)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system["system"] + system["round"])
def test_systems_have_the_optimizer_that_was_submitted(system: dict[str, Any]) -> None:
    # set_wd_mult of MXNet's SGD and of SGDwFASTLARS; SoftmaxOutput sums over the batch; only v0.7 has warm-up steps
    values, defaults = system["config"], Hyperparameters()
    without = {"sgd": ["beta", "bias"], "lars": ["gamma", "beta"]}[values["optimizer"]]
    assert sorted(values.get("no_weight_decay", defaults.no_weight_decay)) == sorted(without)
    assert values["loss_scale"] == values["batch_size"]
    assert (values.get("warm_up_steps", defaults.warm_up_steps) > 0) == (system["round"] == "v0.7")
