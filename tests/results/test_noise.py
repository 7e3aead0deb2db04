"""The band that seeds make of losses and qualities, and the first step outside it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encore.results.compare import noise
from encore.results.compare.noise import LEVEL, Noise, Series, half_width, judged, losses_of, noise_of, run_in_band
from encore.results.compare.sides import Side, digests
from encore.results.published.published import System

LOSSES = json.loads((Path(__file__).parents[1] / "golden" / "results" / "ncf_losses.json").read_text("utf-8"))
RUNS = {name: LOSSES[name] for name in ("reference", "other_seeds", "learning_rate")}


def series(values: Any, number: int = 1) -> Series:
    return Series(number=number, at=tuple(range(1, len(values) + 1)), values=tuple(map(float, values)))


# Run folder with the losses of each experiment, as far as the noise of a training needs one; as a side.
def written(folder: Path, runs: list[list[float]], **configuration: object) -> Side:
    for number, losses in enumerate(runs):
        path = folder / f"experiment_{number}" / "metrics.jsonl"
        path.parent.mkdir(parents=True)
        steps = [{"kind": "step", "epoch": n // 15 + 1, "step": n + 1, "loss": loss} for n, loss in enumerate(losses)]
        path.write_text("".join(json.dumps(each) + "\n" for each in ({"kind": "start", "resumed_step": 0}, *steps)))
    settings = {"opt_learning_rate": 0.008, **configuration}
    return Side(
        label=folder.name,
        round="v0.5",
        benchmark="ncf",
        hardware=System(described=False),
        folder=folder,
        hyperparameters=settings,
        passport={"seeds": configuration.get("seeds")},
    )


def against(tmp_path: Path, name: str, theirs: list[list[float]], **configuration: object) -> list[Noise]:
    reference = written(tmp_path / f"reference of {name}", theirs)
    return noise_of(written(tmp_path / name, RUNS[name], **configuration), reference)


def test_recorded_losses_of_ncf(tmp_path: Path, recorded: Callable[[str, object], None]) -> None:
    every = [
        *against(tmp_path, "other_seeds", RUNS["reference"]),
        *against(tmp_path, "learning_rate", RUNS["reference"], opt_learning_rate=0.012),
        *noise_of(
            *(written(tmp_path / name, RUNS["reference"][:count]) for name, count in (("itself", 5), ("one", 1)))
        ),
        *noise_of(*(written(tmp_path / f"one of {name}", RUNS[name][:1]) for name in ("reference", "other_seeds"))),
    ]
    json.dumps([each.as_json() for each in every], allow_nan=False)
    recorded("noise.txt", "\n".join(line for each in every for line in each.lines()))


# A loss that is no number, a torn and a foreign line, steps that a resumed run wrote again, every second step alone.
def test_damaged_metrics_of_another_interval(tmp_path: Path) -> None:
    reference = RUNS["reference"]
    own = written(tmp_path / "own", [RUNS["other_seeds"][0]] * 2, seeds="unknown")
    stream = tmp_path / "own" / "experiment_0" / "metrics.jsonl"
    lines = stream.read_text().splitlines()
    again = [json.dumps({**json.loads(line), "loss": 9.0}) for line in lines[21:]]
    junk = ['{"kind": "st', '{"kind": "step", "step": 1e400, "loss": []}', "\udcff[]", "[" * 70_000]
    resumed = [*lines[:21], *again, *junk, '{"kind": "start", "resumed_step": 20}', *lines[21:]]
    stream.write_text("\n".join(resumed), "utf-8", "surrogateescape")
    broken = tmp_path / "own" / "experiment_1" / "metrics.jsonl"
    odd = [json.loads(line) for line in lines[1:]]
    pairs = [{**two, "loss": (one["loss"] + two["loss"]) / 2} for one, two in zip(odd[::2], odd[1::2], strict=True)]
    pairs[20]["loss"] = math.nan
    broken.write_text("".join(json.dumps(each) + "\n" for each in pairs))
    assert losses_of(own)[0].values == tuple(RUNS["other_seeds"][0])
    (found,) = noise_of(own, written(tmp_path / "theirs", [*reference, [math.inf], reference[0][:9]]))
    whole, nan = found.runs
    assert (whole.verdict, len(whole.at), found.references) == ("inside", 60, 5)
    assert found.note.startswith("2 runs of theirs left out")
    assert (nan.first.at, nan.first.epoch, nan.outside, nan.at) == (42, 3, 1, tuple(range(2, 41, 2)))
    assert "first outside at step 42 (epoch 3): not finite" in list(found.lines())[-1]
    json.dumps(found.as_json(), allow_nan=False)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(2, 6), steps=st.integers(2, 300))
def test_what_holds_for_any_runs(seed: int, count: int, steps: int) -> None:
    chance = np.random.default_rng(seed)
    rows = 3 / np.sqrt(np.arange(1, steps + 1)) + 0.05 * chance.standard_normal((count + 1, steps))
    run, *references = [series(row, number) for number, row in enumerate(rows, 1)]
    itself = run_in_band(references[0], references, is_loss=True, level=LEVEL)
    assert (itself.verdict, itself.twin, itself.outside) == ("identical", references[0].number, 0)
    found, turned = (run_in_band(run, order, is_loss=True, level=LEVEL) for order in (references, references[::-1]))
    assert found.half_width == pytest.approx(turned.half_width)
    # Losses in another unit have a band in that unit, and a run that is the mean is inside any band.
    scaled = run_in_band(series(10 * rows[0]), [series(10 * row) for row in rows[1:]], is_loss=True, level=LEVEL)
    assert scaled.half_width == pytest.approx([10 * each for each in found.half_width])
    assert run_in_band(series(rows[1:].mean(0)), references, is_loss=True, level=LEVEL).verdict == "inside"
    # A stricter level never has a narrower band.
    assert (half_width(rows[1:], 0, 0.99) >= half_width(rows[1:], 0, 0.9)).all()
    # A shift of three times the band is found where it begins, or a fiftieth of the run later.
    at = steps // 2
    late = run_in_band(
        series(rows[1:].mean(0) + 3 * max(found.half_width) * (np.arange(steps) >= at)), references, True, LEVEL
    )
    assert late.first is not None
    assert at < late.first.at <= at + 1 + steps / 50 + steps / len(late.at)


def test_same_seed_that_trains_otherwise_from_a_step_on(tmp_path: Path) -> None:
    references = RUNS["reference"]
    twin = [*references[1][:40], *(loss * 1.0001 for loss in references[1][40:])]
    theirs = written(tmp_path / "theirs", references, seeds=[11, 12, 13, 14, 15])
    (found,) = noise_of(written(tmp_path / "own", [twin, RUNS["other_seeds"][0]], seeds=[12, 13]), theirs)
    title, first, second = found.lines()
    assert title.endswith("(no difference of configuration is known)")
    assert first.startswith("  run 1: identical to run 2 of theirs up to step 40, then different; inside the 95 % band")
    assert second.startswith("  run 2: different from run 3 of theirs, which has the same seed, from the first step on")


def test_a_band_is_simulated_once_for_the_steps_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    blank = Noise(quantity="loss", unit="step", tested="", reference="", runs=(), references=0, settings=())
    references = [series(row, number) for number, row in enumerate(RUNS["reference"], 1)]
    runs = [series(row, number) for number, row in enumerate([*RUNS["other_seeds"], RUNS["other_seeds"][0][:40]], 1)]
    level = 1 - (1 - LEVEL) / len(runs)
    alone = [run_in_band(run, references, True, level) for run in runs]
    calls: list[int] = []
    monkeypatch.setattr(noise, "half_width", lambda *given: calls.append(1) or half_width(*given))
    assert [*judged(blank, runs, references).runs] == alone
    assert len(calls) == len({each.at for each in alone}) == 2 < len(runs)


# 70 runs of public sets: how often genuine ones are outside is measured by tools/noise_rates.py.
def test_public_qualities_by_evaluation() -> None:
    blank = Noise(quantity="quality", unit="evaluation", tested="", reference="", runs=(), references=0, settings=())
    found = []
    for side in [side for side in digests("v0.7") if side.benchmark == "resnet"][:12]:
        every = [series(curve.values["value"], n) for n, curve in enumerate(side.curves, 1)]
        found += [judged(blank, [one], [each for each in every if each is not one]).runs[0] for one in every]
    verdicts = [each.verdict for each in found]
    assert verdicts.count("outside") <= 0.1 * len(found)
    assert len(found) >= 60
