"""SSD and Mask R-CNN: schedules as submitted, and rejected weights."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.maskrcnn import events as maskrcnn_events
from benchmarks.ssd import events as ssd_events
from tests.trainings import BareRuns, config_of, write_small_config

# -- schedules --------------------------------------------------------------------------------------------


def test_learning_rate_of_ssd_is_the_submitted_one() -> None:
    config = config_of("ssd", "dgx1", "v0.7", 8)
    assert ssd_events.base_rate(config, 8) == pytest.approx(0.0875), "opt_base_learning_rate of its logs"
    rates = [ssd_events.learning_rate(config, step, 8, 123) for step in (0, 1, 325, 650, 5411, 5412, 6765)]
    assert rates == pytest.approx([0, 0.0875 / 650, 0.04375, 0.0875, 0.0875, 0.00875, 0.000875])
    large = config_of("ssd", "dgx1_n30", "v0.6", 240)
    assert ssd_events.base_rate(large, 240) == pytest.approx(0.1625)
    assert ssd_events.boundaries(large, 240, 70) == [3047, 3809]


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
    timeline = ssd_events.timeline(config, 1, 62)
    assert [step for step in range(1, 125) if timeline.evaluates_after(step)] == steps
    assert [step for step in range(1, 125) if timeline.checkpoints_after(step)] == [62, 124]
    assert [timeline.epoch_num(step) for step in steps] == epochs
    assert timeline.evaluates_inside_epochs == (len(steps) == 3)


def test_learning_rates_of_mask_rcnn_are_the_submitted_ones() -> None:
    config = config_of("maskrcnn", "dgxa100", "v0.7", 8)
    # WarmupMultiStepLR: 0.08 - (800 - step) * 0.0001, then tenths after 18,000 and 24,000 steps.
    weights = {0: 0.0, 400: 0.04, 799: 0.0799, 800: 0.08, 17999: 0.08, 18000: 0.008, 24000: 0.0008}
    # From biases the same is subtracted, but twice the base value is the start.
    biases = {0: 0.08, 400: 0.12, 799: 0.1599, 800: 0.16, 17999: 0.16, 18000: 0.016, 24000: 0.0016}
    for step in weights:
        assert maskrcnn_events.rates(config, step) == pytest.approx((weights[step], biases[step]))
    default = SimpleNamespace(**{**vars(config), "warmup_factor": 0.0})
    for step, factor in ((0, 1 / 3), (400, 2 / 3), (800, 1)):
        assert maskrcnn_events.rates(default, step) == pytest.approx((0.08 * factor, 0.16 * factor))


# -- bad input --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_pickle_that_runs_a_command_is_rejected(
    pytorch_python: Path, toy: Callable[[str], Path], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (tmp_path / "R-50.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")

    def write_config(path: Path, ranks: int, *settings: str) -> Path:
        return write_small_config(path, "maskrcnn", ranks, settings)

    module = "benchmarks.maskrcnn.pytorch.train"
    runs = BareRuns(module, pytorch_python, toy("maskrcnn"), write_config, tmp_path_factory)
    output = runs.refused(tmp_path / "run", 1, f"backbone={tmp_path / 'R-50.pkl'}")
    assert "it names os.system" in output and "hint: set backbone=FILE" in output
