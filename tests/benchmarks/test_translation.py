"""GNMT and the Transformer: learning rates and hyperparameters as submitted."""

from pathlib import Path

import pytest
import yaml
from mlperf_logging import compliance_checker

from benchmarks.common.run.mllog import Noted
from benchmarks.gnmt import events as gnmt_events
from benchmarks.transformer import events as transformer_events
from encore import catalogue
from tests.trainings import config_of

RULES = Path(compliance_checker.__file__).parent
EVENTS = {"gnmt": gnmt_events, "transformer": transformer_events}


def test_learning_rates_are_the_submitted_ones() -> None:
    config = config_of("gnmt", "dgxa100", "v0.7", 8)
    steps = (1, 100, 200, 201, 4053, 4054, 4559, 4560, 5065, 5066, 5571, 5572, 100_000)
    # Its WarmupMultiStepLR counts the first step as 1.
    rates = [gnmt_events.learning_rate(config, step - 1) / 2.875e-3 for step in steps]
    first = 0.01 ** (199 / 200)
    assert rates == pytest.approx([first, 0.1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625, 0.0625])
    config = config_of("transformer", "dgxa100", "v0.7", 8)
    rates = [transformer_events.learning_rate(config, step) for step in (0, 1, 375, 750, 751, 3000)]
    # The first update has the rate 0: fairseq sets the rate of update n after n - 1 updates.
    assert rates == pytest.approx([0, 1.9e-3 / 750, 0.95e-3, 1.9e-3, 1.9e-3 * (750 / 751) ** 0.5, 0.95e-3])


SUBMITTED = [
    pytest.param(name, system.round, system.system, id=f"{name} {system.round} {system.system}")
    for name in EVENTS
    for system in catalogue.systems(catalogue.choose(name))
    if system.kind == "submitted" and system.round != "v0.5"
]


@pytest.mark.parametrize(("name", "round_name", "system"), SUBMITTED)
def test_hyperparameters_pass_the_checker_of_their_round(name: str, round_name: str, system: str) -> None:
    # mlperf-logging has the conditions as Python expressions over ``v``
    file = {"v0.6": f"training_0.6.0/{name}.yaml", "v0.7": f"training_0.7.0/closed_{name}.yaml"}[round_name]
    config = config_of(name, system, round_name, 8)
    events = EVENTS[name].hyperparameters(config, 8)
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
