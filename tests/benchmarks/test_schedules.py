"""Learning rates, computed by hand, and evaluations of the submitted systems."""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.resnet.config import Hyperparameters
from tests.trainings import checked_config, config_of


def schedule_of(benchmark: str) -> Any:
    return importlib.import_module(f"benchmarks.{benchmark}.schedule")


Make = Callable[[], Any]  # Returns a configuration


def resnet(**changes: Any) -> Hyperparameters:
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


def gnmt(config: Any, step: int) -> float:
    # Its WarmupMultiStepLR counts the first step as 1
    return schedule_of("gnmt").learning_rate(config, step - 1) / 2.875e-3


def mask_rcnn_rates(parameters: str) -> Callable[[Any, int], float]:
    return lambda config, step: getattr(schedule_of("maskrcnn").rates(config, step), parameters)


mask_rcnn = partial(config_of, "maskrcnn", "dgxa100", "v0.7", 8)
lora = partial(checked_config, "llama2-70b-lora", "eos", "v4.0")
llama = partial(checked_config, "llama31-8b", "reference_h200", None)


@pytest.mark.parametrize(
    ("rule", "config", "arguments", "rates"),
    [
        (
            schedule_of("resnet").learning_rate, resnet, [10],
            {0: 0.4, 9: 4.0, 18: 7.6, 19: 8.0, 59: 0.5 + 7.5 * 0.25, 99: 0.5, 120: 0.5},
        ),
        (schedule_of("resnet").learning_rate, partial(resnet, warmup_epochs=0), [10], {0: 0.5 + 7.5 * 0.99**2}),
        (
            schedule_of("resnet").learning_rate, partial(resnet, schedule="step"), [10],
            {0: 0.4, 9: 4.0, 39: 8.0, 40: 0.8, 60: 0.08, 99: 0.08},
        ),
        (schedule_of("resnet").learning_rate, partial(resnet, schedule="step", warmup_epochs=0), [10], {0: 8.0}),
        # The first step of LinearWarmupPolyDecayScheduler is 1; the warm-up began at -76
        (
            schedule_of("bert").learning_rate, partial(config_of, "bert", "dgxa100_n256", None, 8, nodes=256), [],
            {0: 0.00288293 * 77 / 287, 209: 0.00288293 * 286 / 287, 210: 0.00288293 * (1 - 211 / 560), 559: 0},
        ),
        (
            schedule_of("bert").learning_rate, partial(config_of, "bert", "dgxa100", None, 8), [],
            {0: 3.5e-4 * (1 - 1 / 13700)},
        ),
        (
            schedule_of("bert_squad").learning_rate, partial(config_of, "bert-squad", "dgxa100-80g", None, 8), [100],
            {0: 0.05 * 4.6e-5, 9: 2.3e-5, 19: 4.6e-5, 20: 4.6e-5 * 79 / 80, 59: 2.3e-5, 99: 0},
        ),
        # LearningRateScheduler in NVIDIA's code counts the first step as 1
        (
            schedule_of("dlrm").learning_rate, partial(config_of, "dlrm", "dgxa100", "v0.7", 8), [],
            {
                0: 24 / 2750, 1374: 12, 2749: 24, 49314: 24, 49315: 24 * (27771 / 27772) ** 2, 63200: 6, 77086: 0,
                90000: 0,
            },
        ),
        # 0.0875 is opt_base_learning_rate of its logs
        (
            schedule_of("ssd").learning_rate, partial(config_of, "ssd", "dgx1", "v0.7", 8), [8, 123],
            {0: 0, 1: 0.0875 / 650, 325: 0.04375, 650: 0.0875, 5411: 0.0875, 5412: 0.00875, 6765: 0.000875},
        ),
        (
            schedule_of("ssd").learning_rate, partial(config_of, "ssd", "dgx1_n30", "v0.6", 240), [240, 70],
            {3046: 0.1625, 3047: 0.01625, 3808: 0.01625, 3809: 0.001625},
        ),
        # WarmupMultiStepLR: 0.08 - (800 - step) * 0.0001, then tenths after 18,000 and 24,000 steps. From biases the
        # same is subtracted, but twice the base value is the start
        (
            mask_rcnn_rates("weights"), mask_rcnn, [],
            {0: 0.0, 400: 0.04, 799: 0.0799, 800: 0.08, 17999: 0.08, 18000: 0.008, 24000: 0.0008},
        ),
        (
            mask_rcnn_rates("biases"), mask_rcnn, [],
            {0: 0.08, 400: 0.12, 799: 0.1599, 800: 0.16, 17999: 0.16, 18000: 0.016, 24000: 0.0016},
        ),
        (
            mask_rcnn_rates("weights"), partial(mask_rcnn, "warmup_factor=0.0"), [],
            {0: 0.08 / 3, 400: 0.08 * 2 / 3, 800: 0.08},
        ),
        (
            mask_rcnn_rates("biases"), partial(mask_rcnn, "warmup_factor=0.0"), [],
            {0: 0.16 / 3, 400: 0.16 * 2 / 3, 800: 0.16},
        ),
        (
            gnmt, partial(config_of, "gnmt", "dgxa100", "v0.7", 8), [],
            {
                1: 0.01 ** (199 / 200), 100: 0.1, 200: 1, 201: 1, 4053: 1, 4054: 0.5, 4559: 0.5, 4560: 0.25,
                5065: 0.25, 5066: 0.125, 5571: 0.125, 5572: 0.0625, 100_000: 0.0625,
            },
        ),
        # The first update has the rate 0: fairseq sets the rate of update n after n - 1 updates
        (
            schedule_of("transformer").learning_rate, partial(config_of, "transformer", "dgxa100", "v0.7", 8), [],
            {0: 0, 1: 1.9e-3 / 750, 375: 0.95e-3, 750: 1.9e-3, 751: 1.9e-3 * (750 / 751) ** 0.5, 3000: 0.95e-3},
        ),
        (
            schedule_of("llama").learning_rate, llama, [],
            {
                0: 5e-4 / 513, 255: 5e-4 * 256 / 513, 512: 5e-4, 600_256: 5e-4 * 0.55, 1_200_000: 5e-5,
                2_000_000: 5e-5,
            },
        ),
        # The reference's log has 1/128 of the base rate after the first step
        (
            schedule_of("llama").megatron_learning_rate,
            partial(config_of, "gpt-oss-20b", "reference_b200", None, 8), [],
            {0: 0, 1: 4e-4 / 128, 128: 4e-4, 600_000: 4e-4 * 0.55, 1_199_872: 4e-5, 1_200_000: 4e-5},
        ),
        (
            schedule_of("llama").learning_rate, lora, [],
            {0: 5e-4, 448: 2.5e-4, 895: 5e-4 * (1 - math.cos(math.pi / 896)) / 2},
        ),
    ],
)  # fmt: skip
def test_learning_rates(
    rule: Callable[..., float], config: Make, arguments: list[int], rates: dict[int, float]
) -> None:
    settings = config()
    assert {step: rule(settings, step, *arguments) for step in rates} == pytest.approx(rates, rel=1e-6)


ssd = partial(config_of, "ssd", "cpu", None, 1, "epochs=2", "batch_size=16", "checkpoint_interval=1")


@pytest.mark.parametrize(
    ("benchmark", "config", "arguments", "last", "epochs"),
    [
        # The first train_samples of NVIDIA's log, in steps of 256, and its max_steps
        (
            "bert", partial(config_of, "bert", "dgxa100", None, 8), [8], 13700,
            {11719: 1, 13672: 1, 13700: 1},
        ),
        ("llama", llama, [8], 1200, {384: 12288, 768: 24576, 1152: 36864}),
        ("llama", partial(llama, "batch_size=3"), [8], 1100, {512: 12288, 1024: 24576}),
        # NVIDIA's log has 1536, 1920 ... samples; training_rules.adoc has 384 rounded up to full steps of 128
        ("llama2_70b_lora", partial(lora, "batch_size=8", "max_steps=999"), [4], 240, {192: 1536, 240: 1920}),
        ("llama2_70b_lora", partial(lora, "batch_size=8", "max_steps=200"), [4], 200, {192: 1536, 200: 1600}),
        ("llama2_70b_lora", partial(lora, "batch_size=64", "max_steps=999"), [4], 72, {66: 11 * 384, 72: 4608}),
        ("llama2_70b_lora", partial(lora, "batch_size=128", "max_steps=999"), [4], 60, {57: 19 * 384, 60: 7680}),
        (
            "llama2_70b_lora", partial(lora, "batch_size=1000", "max_steps=999"), [4], 129,
            {128: 128_000, 129: 129_000},
        ),
        # Steps of 32 images, as v0.5 and v0.6 count, and the end
        ("ssd", partial(ssd, "eval_steps=[20, 41]"), [1, 62], 124, {40: 1, 82: 2, 124: 2}),
        ("ssd", partial(ssd, "eval_epochs=[1]"), [1, 62], 124, {62: 1, 124: 2}),
    ],
)  # fmt: skip
def test_steps_and_epochs_of_evaluations(
    benchmark: str, config: Make, arguments: list[int], last: int, epochs: dict[int, int]
) -> None:
    line = schedule_of(benchmark).timeline(config(), *arguments)
    assert {step: line.epoch_num(step) for step in range(1, last + 1) if line.evaluates_after(step)} == epochs


def test_properties_of_timelines() -> None:
    by_steps, by_epochs = (
        schedule_of("ssd").timeline(ssd(setting), 1, 62) for setting in ("eval_steps=[20, 41]", "eval_epochs=[1]")
    )
    assert [step for step in range(1, 125) if by_steps.checkpoints_after(step)] == [62, 124]
    assert (by_steps.evaluates_inside_epochs, by_epochs.evaluates_inside_epochs) == (True, False)
    # Llama: 1,200,000 steps of 32 samples, an evaluation after 384
    assert schedule_of("llama").evaluations(llama(), 8) == 3126
    assert schedule_of("llama").timeline(llama(), 8).lower_is_better
    assert schedule_of("resnet").timeline(config_of("resnet", "cpu", None, 1), 100).target_is_exceeded
    assert schedule_of("dlrm").timeline(config_of("dlrm", "cpu", None, 1), 100).target_is_exceeded
