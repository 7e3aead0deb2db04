"""Whole outputs on recorded logs, against tests/golden/results: look at what ENCORE_RECORD=1 changes there."""

import gzip
import json
import lzma
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker import mlp_compliance

from encore.errors import EncoreError
from encore.files import plain as plain_json
from encore.results.audit.audit import audit_score
from encore.results.compare.compare import compare, format_certainty
from encore.results.compare.digest import main as make_digests
from encore.results.compare.explain import explain
from encore.results.compare.run_set import load_run_set
from encore.results.compare.run_set import submission as published_set
from encore.results.compliance.compliance import check, score_and_check
from encore.results.compliance.convergence import convergence_of, report_of
from encore.results.logs import run_log
from encore.results.logs.reader import read_events
from encore.results.logs.run_log import RunLog, read_run
from encore.results.logs.timing import curve_of, length_of, phases_of
from encore.results.published.published import DIGESTS, load_published
from encore.results.scores.power import energy_of
from encore.results.scores.score import read_scaling
from tests.command_line import output_of, run_encore
from tests.results.result_logs import (
    START_MS,
    a100_texts,
    dell_texts,
    flux1_v61,
    log_of,
    mll,
    mllog,
    power_log,
    resnet_v05,
    resnet_v07,
    timed_log,
    v05,
    write_files,
    write_set,
)

Record = Callable[[str, Any], None]
GOLDEN = Path(__file__).parents[1] / "golden" / "results"
LATER_MS = 1_640_000_000_000  # In the months of v2.0
LONG_AFTER_MS = 1_893_456_000_001  # After all rounds
A100 = "v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"
DELL = "v4.0/Dell/XE9680x8H100-SXM-80GB"

DIALECTS = (
    v05("run_start")
    + v05("eval_accuracy", '{"epoch": 2, "value": 0.25282}')
    + v05("opt_learning_rate", '"DEFERRED: 63b1d3f4"')
    + v05("model_hp_final_shape", "(224, 224, 3) -> (112, 112, 64)")
    + ":::MLPv0.5.0 resnet 1541720383.838108063 (<string>:1) run_clear_caches\n"
    # Written twice by the logger.
    + f"INFO:mlperf_compliance:{v05('run_start')}{v05('run_start')}"
    + mll("run_stop", seconds=1560888652.056, status="success")
    # Metadata printed by Python.
    + ":::MLL 1560873710.141025 run_start: {\"value\": null, \"metadata\": {'lineno': 615, 'file': 'a.py'}}\n"
    # One submitter of v0.6, with times of one second.
    + "MLPerf: resnet [06/13/19 00:30:57], run_set_random_seed:2019\n"
    + 'MLPerf: resnet [06/13/19 00:55:21], eval_accuracy: {"value": 75.98000%, "epoch": 79}\n'
    + "MLPerf: resnet [06/13/19 00:55:21], run_stop\n"
    # The rank in front, as srun writes it, and foreign text between.
    + f"0: {mllog('run_start')}some other text\n 12: {mllog('seed', 7)}"
    + ':::MLLOG {"key": "run_start", "value": null, "time_s": 1593354424.831, "metadata": {}}\n'
    + ':::MLLOG {"key": "run_stop", "value": null, "time_s": 0.0, "metadata": {}}\n'
    # Several events on one line; a mark inside an event is text.
    + f"{mllog('epoch_start', epoch_num=1).strip()}{mllog('epoch_stop').strip()} 50%|### {mllog('seed', 1)}"
    + mllog("submission_entry", f"echo {mllog('run_start').strip()}")
    + ':::MLLOG {"namespace": "", "time_m' + mllog("run_start")
    + ':::MLLOG {"key": "a", "time_ms": NaN, "namespace": "w"}\n:::MLLOG {"key": "b", "time_ms": 1e999}\n'
    + ':::MLLOG {"key": "c", "time_ms": true, "metadata": [1]}\n:::MLLOG {"key": "d", "time_ms": "1592669288183"}\n'
    + ':::MLLOG {"key": "e", "time_ms": "1_592"}\n:::MLLOG {"key": 3}\n:::MLLOG null\n:::MLLOG\n:::ML\n'
    + ":::MLL 1.2.3 run_start: {}\n:::MLL 1 run_start: nothing\n:::MLPv0.5.0 resnet 1.2.3 (a:1) run_start\n"
    + "MLPerf: resnet [99/99/99 99:99:99], run_start\n" + ":::MLLOG {" * 12 + mllog("seed", 8)
)  # fmt: skip


@pytest.fixture
def long_after(monkeypatch: pytest.MonkeyPatch) -> None:
    # Logs of later rounds are not in the future
    monkeypatch.setattr(run_log, "_latest_s", lambda: LONG_AFTER_MS)


def test_events_of_every_dialect(tmp_path: Path, recorded: Record) -> None:
    text = b"\x00\xff\xfe progress \x80\n" + DIALECTS.encode() + b"\xc3\x28" * 20 + mllog("seed", 1).encode()
    path, damaged = write_files(tmp_path, {"result_0.txt": text}) / "result_0.txt", []
    events = [
        [event.line, event.dialect, event.time_s, event.key, event.value, dict(event.metadata), *event[6:]]
        for event in read_events(path, lambda *line: damaged.append(line))
    ]
    recorded("events.json", {"events": events, "damaged": damaged})


def v06(*events: str, benchmark: str = "transformer") -> str:
    begin = mll("submission_benchmark", benchmark, 1_560_822_683.0) + mll("run_start", None, 1_560_822_683.0)
    return begin + "".join(events) + mll("run_stop", None, 1_560_822_743.0, status="success")


def evaluated(value: object, **metadata: object) -> str:
    return mll("eval_accuracy", value, 1_560_822_743.0, epoch_num=3, **metadata)


def at(minutes: float, key: str, value: object = None, **metadata: object) -> str:
    return mllog(key, value, LATER_MS + minutes * 60_000, **metadata)


# Three epochs begun, numbered 0 to 2; v0.5 logs number the evaluation after them 3, 2 or 1.
def numbered(shift: int) -> str:
    begin = 1_541_720_386.0
    epochs = [
        v05("train_epoch", str(epoch), begin + 10 + 60 * epoch)
        + v05("eval_accuracy", f'{{"epoch": {epoch + shift}, "value": {0.7 + 0.025 * epoch}}}', begin + 69 + 60 * epoch)
        for epoch in range(3)
    ]
    return "".join([v05("run_start", seconds=begin), *epochs, v05("run_stop", seconds=begin + 190)])


# Evaluation inside an epoch: v0.7 NVIDIA DLRM has the share done on top of its number; others differ.
# In v1.0 Supermicro as-4142gs-tnr the epoch stops 5 ms before the quality, by times that were rounded.
def inside(first: int, number: float) -> str:
    return log_of(
        "dlrm",
        mllog("epoch_start", None, LATER_MS + 1, epoch_num=first),
        mllog("eval_start", None, LATER_MS + 500, epoch_num=number),
        mllog("epoch_stop", None, LATER_MS + 995, epoch_num=first + 1),
        mllog("eval_accuracy", 0.91, LATER_MS + 1000, epoch_num=number),
    )


# Metrics that are logged one by one, in v3.1 by steps, all FIDs before the CLIP scores.
def diffusion(fid: float, clip: float, **position: int) -> str:
    half = {name: number // 2 for name, number in position.items()}
    return log_of(
        "stable_diffusion",
        mllog("global_batch_size", 1024, LATER_MS),
        mllog("eval_accuracy", 130.0, LATER_MS + 1, metric="FID", **half),
        mllog("eval_accuracy", fid, LATER_MS + 2, metric="FID", **position),
        mllog("eval_accuracy", 0.99, LATER_MS + 3, metric="CLIP", **half),
        mllog("eval_accuracy", clip, LATER_MS + 4, metric="CLIP", **position),
    )


# Log whose first event of this key has another text in place of its time.
def timed(key: str, time: str) -> str:
    return re.sub(rf'("time_ms": )\d+([^\n]*"{key}")', rf"\g<1>{time}\2", resnet_v07(40.0), count=1)


_CONVERTER = "/workspace/dlrm/mlperf_logger/format_ctr_output.py"
_QUALITIES = {**{number: 0.1 + number / 1e6 for number in range(9000)}, 6000: 0.77, 7000: 55.0}
_MANY = [mllog("eval_accuracy", value, LATER_MS + number, epoch_num=number) for number, value in _QUALITIES.items()]
_AFTER_STOP = "".join(
    mllog("eval_accuracy", value, START_MS + (50 + number) * 60_000, epoch_num=number)
    for number, value in ((1, 0.5), (2, 0.7605), (3, 0.77))
)
GRADIENTS = mllog("gradient_accumulation_steps", 1)

LOGS: dict[str, str | tuple[str, str]] = {
    "good": resnet_v07(),
    "no event": "nothing here\n",
    "no start": mllog("submission_benchmark", "resnet"),
    "no stop": mllog("run_start") + mllog("eval_accuracy", 0.8, epoch_num=1),
    "aborted": resnet_v07(status="aborted"),
    "missed": resnet_v07(quality=(0.3, 0.7589)),
    "missed by little": resnet_v07(quality=(0.3, 0.75899995)),
    "no quality": resnet_v07(quality=()),
    "no number": resnet_v07(quality=(float("nan"), float("nan"))),
    "stop before start": resnet_v07(-3.0),
    "second run": resnet_v07() + resnet_v07(start_ms=START_MS + 10**7),
    "two benchmarks": resnet_v07() + mllog("submission_benchmark", "bert"),
    "damaged first": ':::MLLOG {"namespace": ' + resnet_v07(),
    "damaged stop": resnet_v07()[: resnet_v07().index("run_stop") + 4],
    "damaged evaluation": resnet_v07() + ':::MLLOG {"key": "epoch_stop", "val\n',
    "other digits": resnet_v07().translate(str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")),
    "processes that disagree": resnet_v07(40.0) + mllog("run_stop", None, START_MS + 2_400_001, status="aborted"),
    # Each rank may log run_start; the official summarizer takes the last one and so shortens the run.
    "several starts": resnet_v07(40.0).replace(
        mllog("run_start"), mllog("run_start") + mllog("run_start", None, START_MS + 5000)
    ),
    "61 days": resnet_v07(61 * 1440.0),
    "59 days": resnet_v07(59 * 1440.0),
    "in seconds": resnet_v07(40.0 / 1000, start_ms=START_MS // 1000),
    **{
        f"{key} at {time}": timed(key, time)
        for key in ("run_start", "run_stop")
        for time in ("-1e+303", "0", "-5", "1592669288", '"١٥٩٢٦٦٩٢٨٨١٨٣"', "NaN", "null", "1e300", "1308853388183")
    },
    "v0.5": resnet_v05(134.5),
    "v0.5 missed": resnet_v05(quality=0.7),
    "v0.5 failed": resnet_v05(stop='{"success": false}'),
    "v0.6 minigo without run_stop": (
        mll("submission_benchmark", "minigo", 1_560_822_988.0)
        + mll("run_start", None, 1_560_822_993.653)
        + mll("eval_accuracy", 0.51, 1_560_827_993.0, epoch_num=19)
        + mll("eval_result", None, 1_560_827_994.0, iteration=19, timestamp=1725.869)
    ),
    "BLEU as text": v06(evaluated("25.329875946044922")),
    "BLEU as a fraction": ("v0.7", log_of("transformer", at(1, "eval_accuracy", 0.2527, epoch_num=3))),
    # Encore logs a system of v0.6 in the lines of v0.7, whatever it reaches.
    "BLEU of v0.6 in lines of v0.7": ("v0.6", log_of("transformer", at(1, "eval_accuracy", 0.0527, epoch_num=3))),
    "BLEU of nothing learnt": v06(evaluated(0.05)),
    "BLEU through float32": ("v0.5", v06(evaluated(21.799999237060547), benchmark="gnmt")),
    "box and mask as a pair": v06(evaluated([0.381, 0.3435]), benchmark="mask"),
    "box and mask deeper": v06(evaluated({"accuracy": {"BBOX": 0.381, "SEGM": 0.3435}}), benchmark="mask"),
    "box and mask by name": v06(evaluated({"BBOX": 0.381, "SEGM": 0.3435}), benchmark="mask"),
    "mask missed": v06(evaluated({"BBOX": 0.381, "SEGM": 0.3385}), benchmark="mask"),
    # v0.7 NVIDIA DLRM: seconds since 1970 with milliseconds added to them, in two accepted submissions.
    "HugeCTR's converter": (
        "v0.7",
        mllog("submission_benchmark", "dlrm", START_MS)
        + mllog("run_start", None, 1_592_985_147, file=_CONVERTER)
        + mllog("eval_accuracy", 0.8026, 1_593_184_000, file=_CONVERTER, epoch_num=0.9)
        + mllog("run_stop", None, 1_593_184_341, file=_CONVERTER, status="success"),
    ),
    **{
        f"{benchmark} in another unit": (round_, log_of(benchmark, at(1, "eval_accuracy", value, epoch_num=1)))
        for benchmark, round_, value in (
            ("resnet", "v0.7", 55.0), ("rnnt", "v1.0", -1.0), ("unet3d", "v2.0", 91.0), ("gpt3", "v3.0", 1.5),
        )
    },
    "stable diffusion by samples": ("v3.1", diffusion(89.9, 0.151, samples_count=2_048_000)),
    "stable diffusion by steps": ("v3.1", diffusion(999.0, 0.2, step_num=1750)),
    "9000 evaluations": ("v2.0", log_of("resnet", *_MANY)),
    "a long curve": resnet_v07(100.0, quality=(*(0.7595 * number / 40 for number in range(40)), 0.7605)),
    "thousands of epochs": log_of("unet3d", at(1, "eval_accuracy", 0.91, epoch_num=2495)),
    "thousands of steps": log_of("gpt3", at(1, "eval_accuracy", 2.5, epoch_num=2495)),
    "epochs and the share of one": inside(1, 1.899193),
    "the whole of an epoch": inside(1, 2.0),
    "the number of the epoch": inside(1, 1),
    "epochs from 0": inside(0, 0.75),
    "the share alone": inside(1, 0.75),
    "behind its epoch": log_of(
        "dlrm",
        at(1, "epoch_start", None, epoch_num=1),
        at(2, "epoch_stop", None, epoch_num=1),
        at(3, "eval_accuracy", 0.91, epoch_num=1.5),
    ),
    **{f"evaluation numbered from {shift}": numbered(shift) for shift in (1, 0, -1)},
    # The target of the open division is unknown: there the last model that was evaluated ended the run.
    "evaluated after the clock": resnet_v07(40.0, quality=()) + _AFTER_STOP,
    "evaluated after the clock, open": resnet_v07(40.0, quality=(), submission_division="open") + _AFTER_STOP,
    "a speed without a time": log_of("resnet", mllog("tracked_stats", {"throughput": 5.0}, None)),
    "phases": timed_log(60.0, 3.0),
    "v1.0": resnet_v07(start_ms=1_620_000_000_000) + GRADIENTS,
    "v0.7 in 2030": resnet_v07(start_ms=LONG_AFTER_MS),
    "any later round": resnet_v07(start_ms=LONG_AFTER_MS) + GRADIENTS,
    "a benchmark of HPC": log_of("cosmoflow"),
    "two benchmarks of HPC": log_of("cosmoflow", mllog("submission_benchmark", "deepcam", START_MS)),
    "neither status nor a known target": log_of("cosmoflow").replace('"status": "success"', '"lineno": 1'),
    "a crash before the benchmark": at(0, "cache_clear", True),
    **{
        f"foreign text {number}": text
        for number, text in enumerate((
            "\n\n",
            ":::MLLOG \n:::MLL \n:::MLPv0.5.0 \nMLPerf: ",
            ":::MLLOG null\n:::MLLOG []\n:::MLLOG 7\n",
            ':::MLLOG {"key": 3}\n:::MLLOG {"key": null, "time_ms": 1}\n',
            ':::MLLOG {"key": "a", "time_ms": ' + "9" * 5000 + "}\n",
            ":::MLLOG " + "[" * 100_000 + "\n",
            ':::MLLOG {"key": "a", "value": ' + "[" * 5000 + "]" * 5000 + "}\n",
            ":::MLPv0.5.0 resnet 1.2.3 (a:1) run_start\n:::MLPv0.5.0 resnet 1 (a:" + "1" * 5000 + ") run_start\n",
            "::::MLLOG:::MLLOG:::MLL:::ML\n" * 3,
        ))
    },
}  # fmt: skip


def summary(run: RunLog) -> dict[str, Any]:
    quality = [[point.epoch, point.samples, point.time_s, point.line, dict(point.values)] for point in run.quality]
    if len(quality) >= 20:
        quality = [len(quality), *quality[:2], *quality[-2:], quality[min(4100, len(quality) // 2)]]
    curve, length = curve_of(run), length_of(run)
    ends = [[minutes[:2], minutes[-2:]] for minutes in (curve.minutes, *curve.values.values())]
    return {
        **{name: value for name, value in vars(run).items() if value not in (None, "", (), [], 0, False)},
        "path": str(run.path),
        "reason": run.reason,
        "dialects": sorted(run.dialects),
        "quality": quality,
        "best": dict(run.best_quality),
        "targets": [f"{target.name} {target.value:g} {target.unit}" for target in run.targets],
        "length": [length.value, length.unit] if length else None,
        "timing": phases_of(run),
        "curve": [len(curve.minutes), *curve.values, *ends],
    }


def test_logs(tmp_path: Path, recorded: Record, long_after: None) -> None:
    # All are recorded by their differences from the first one
    summaries: dict[str, dict[str, Any]] = {}
    for name, content in LOGS.items():
        round_, text = content if isinstance(content, tuple) else (None, content)
        run = read_run(write_set(tmp_path, [text]) / "result_0.txt", round_)
        assert (run.minutes is None) == (run.reason is not None), name
        values, good = summary(run), summaries.get("good", {})
        summaries[name] = {key: values.get(key) for key in {**good, **values} if values.get(key) != good.get(key)}
    recorded("logs.json", summaries)


# --- sets -------------------------------------------------------------------------------------------------

MISSED = resnet_v07(10.0, quality=(0.3,), status="aborted", seed=9)
_FIVE = [
    resnet_v07(minutes, start_ms=START_MS + 10**7 * n, seed=n)
    for n, minutes in enumerate((40.0, 41.0, 39.0, 45.0, 42.0))
]
_BETWEEN_MS = 1_623_560_000_000  # Between two deadlines
_V10, _V11 = (
    log_of("bert", mllog("eval_accuracy", 0.73, _BETWEEN_MS), start_ms=_BETWEEN_MS + shift)
    for shift in (-(10**8), 10**8)
)


def ncf(number: int) -> str:
    start = 1_541_731_858.0 + 1000 * number
    success, quality = ("false", 0.6) if number % 5 == 0 else ("true", 0.6352)
    return (
        v05("run_start", seconds=start, benchmark="ncf")
        + v05("eval_accuracy", f'{{"epoch": 12, "value": {quality}}}', start + 20, "ncf")
        + v05("run_stop", f'{{"success": {success}}}', start + 60 + number, "ncf")
    )


def files(texts: Sequence[str | bytes], **others: str) -> dict[str, str | bytes]:
    return {**{f"result_{number}.txt": text for number, text in enumerate(texts)}, **others}


def _power(nodes: int = 2, runs: int = 5) -> dict[str, str]:
    logs = {
        **{f"node_{node}": power_log([1000.0, 2000.0, 3000.0 + node], stop=node == 0) for node in range(nodes)},
        "sw_0": mllog("conversion_eff", 0.5) + mllog("interconnect_power_est", 400),
    }
    return {f"power/result_{run}/{name}.txt": text for run in range(runs) for name, text in logs.items()}


def scaled(factor: object) -> dict[str, str]:
    return {"scaling.json": factor if isinstance(factor, str) else json.dumps({"scaling_factor": factor})}


FACTORS = (
    "", "[]", "{}", "[" * 30_000, " " * 70_000 + '{"scaling_factor": 1.1}',
    *(
        f'{{"scaling_factor": {value}}}'
        for value in ("1", "10", '"1.1"', "true", "NaN", "1e999", "0.5", "11", "1" + "0" * 400)
    ),
)  # fmt: skip
SETS: dict[str, Mapping[str, str | bytes]] = {
    "five runs": files(_FIVE),
    "one missed": files([*_FIVE[:4], MISSED]),
    "two missed": files([*_FIVE[:3], MISSED, MISSED]),
    "not complete": files(_FIVE[:2]),
    "two benchmarks": files([_FIVE[0], resnet_v07(submission_benchmark="bert")]),
    "twelve": files([_FIVE[n % 5] for n in range(12)]),
    "damaged": files([*_FIVE[:4], _FIVE[4][: _FIVE[4].index("run_stop") + 4]]),
    # MLCommons' scores count a crash as a missed target in 14 public sets.
    "crashed without event": files([*_FIVE[:4], "killed\n"]),
    "crashed before its start": files([*_FIVE[:4], mllog("cache_clear", True)]),
    "crashed before its stop": files([*_FIVE[:4], "".join(_FIVE[4].splitlines(keepends=True)[:-1])]),
    "two crashed": files([*_FIVE[:3], "killed\n", "killed\n"]),
    "suspicious": files(
        [resnet_v07(n) for n in (0.46, 0.46, 0.47, 0.46)] + [resnet_v07(922.5, start_ms=1_592_800_000_000)]
    ),
    "the same log": files([resnet_v07()] * 5),
    "ncf": files([ncf(number) for number in range(100)]),
    "ncf, too few": files([ncf(5 * number) for number in range(100)]),
    "v0.5": files([resnet_v05(134.0 + number) for number in range(5)]),
    "v0.7 with a factor": files(_FIVE, **scaled(1.19)),
    # Five logs, written on both sides of a deadline, and a crash before the benchmark is named.
    "one folder is one round": files([_V11, *[_V10] * 8, mllog("submission_benchmark", "bert", _BETWEEN_MS)]),
    "a round by its folder": {f"training_results_v1.1/bert/{name}": text for name, text in files([_V11, _V10]).items()},
    "a run folder": {
        **files(_FIVE[:2]),
        **{f"experiment_0/{name}": text for name, text in files(_FIVE[:1]).items()},
        "run.json": '{"round": "v1.0"}',
    },
    "a run folder of no round": files(_FIVE[:1], **{"run.json": '{"round": "v9.9"}'}),
    "a damaged run.json": files(_FIVE[:1], **{"run.json": "[" * 100_000}),
    # Of a submitter, results only
    "a tree of a submitter": {f"{name}/result_0.txt": _FIVE[0] for name in ("Lab/results/s/resnet", "Lab/code/resnet")},
    "a submitter": {
        f"{name}/result_0.txt": _FIVE[0] for name in ("results/s/resnet", "benchmarks/resnet/logs", "systems")
    },
    "results next to others": {f"{name}/result_0.txt": _FIVE[0] for name in ("results/one", "other")},
    "code next to others": {f"{name}/result_0.txt": _FIVE[0] for name in ("code", "other")},
    "a tree": {
        f"{name}/{file}": text
        for name, texts in (("a", _FIVE), ("b", [resnet_v05()]))
        for file, text in files(texts).items()
    },
    "a benchmark of HPC": files([log_of("cosmoflow")]),
    "a benchmark that no round had": files([flux1_v61(submission_benchmark="flux9") for _ in range(3)]),
    "v6.1": files([flux1_v61(40.0 + number, seed=number) for number in range(10)]),
    "a round to come": {"training_results_v7.0/flux1/result_0.txt": flux1_v61()},
    "control characters": files([resnet_v07(), resnet_v07(status="\x1b[2Jaborted")]),
    "small data": files([resnet_v07(train_samples=10, eval_samples=10), resnet_v07(cache_clear=None)]),
    "gzip without its name": files([gzip.compress(text.encode()) for text in _FIVE]),
    "a damaged file": {**files(_FIVE[:4]), "result_4.txt.gz": gzip.compress(_FIVE[4].encode(), mtime=0)[:30]},
    "official": files(dell_texts(), **scaled(1.004222999)),
    "another factor": files(dell_texts(), **scaled(1.1)),
    "raw": files(dell_texts()),
    "convergence at a batch of the reference": files(dell_texts(batch=3264)),
    "convergence beyond the reference": files(dell_texts((40,) * 5, 3264)),
    "one without convergence": files([*dell_texts(batch=3264)[:4], dell_texts(batch=3264)[4].replace("0.7595", "0.7")]),
    "two without convergence": files(
        [*dell_texts(batch=3264)[:3], *(text.replace("0.7595", "0.7") for text in dell_texts(batch=3264)[3:])]
    ),
    "too few epochs": files(dell_texts((30,) * 5, 3264)),
    "a smaller batch": files(dell_texts((37,) * 5, 208)),
    "a larger batch": files(dell_texts((50,) * 5, 10**6)),
    "another unit": files(dell_texts((0.35,) * 5, 3264)),
    "open": files([text.replace('"closed"', '"open"') for text in dell_texts()]),
    "batches that do not agree": files([*dell_texts()[:3], *dell_texts(batch=3264)[3:]]),
    "two aborted with a reference": files(
        [*(text.replace("success", "aborted") for text in dell_texts()[:2]), *dell_texts()[2:]]
    ),
    "numbered by another key": files([text.replace('"epoch_num": 35', '"x": 0') for text in dell_texts()]),
    "number 0": files([text.replace('"epoch_num": 35', '"epoch_num": 0') for text in dell_texts()]),
    # The installed checker has points of DLRM and no number of runs.
    "a reference without a number of runs": {
        f"training_results_v1.0/dlrm/result_{number}.txt": text.replace("resnet", "dlrm").replace("0.7595", "0.8026")
        for number, text in enumerate(dell_texts((0.95,) * 5, 65536))
    },
    "without a length": files([text.replace('"epoch_num": 35', '"epoch_num": [[]]') for text in dell_texts()]),
    "power": files(dell_texts(), **scaled(1.01), **_power()),
    "power of two runs": files(dell_texts(), **_power(runs=2)),
    "power without a start": files(
        dell_texts(), **{**_power(), "power/result_1/node_0.txt": mllog("power_reading", 5.0)}
    ),
    "power of no time": files(
        dell_texts(),
        **{
            f"power/result_{n}/node_0.txt": mllog("power_measurement_stop") + power_log([900.0], stop=False)
            for n in range(5)
        },
    ),
}


def file_of(name: str) -> str:
    return re.sub(r"\W+", "-", name.replace("-", "m")).strip("-")


# The table is as wide as the folder's path
def lines_of(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if "──" not in line]


@pytest.mark.slow
def test_sets(tmp_path: Path, recorded: Record) -> None:
    # Score, audit, energy and reference convergence of each set, and the lines that `score` and `check` print
    results: dict[str, Any] = {}
    for name, content in SETS.items():
        scores, reports = score_and_check(folder := write_files(tmp_path / file_of(name) / "logs", content))
        printed, checked = (run_encore(command, folder, width=1000) for command in ("score", "check"))
        assert "\x1b" not in printed.stdout + checked.stdout
        results[name] = {
            "rulesets": sorted({str(report.ruleset) for report in reports}),
            "score": lines_of(printed.stdout)[1:30],
            "check": [line for line in checked.stdout.splitlines() if re.search("reference|logs pass|; ruleset", line)][
                -3:
            ],
            "exit code": checked.exit_code,
        }
        for number, score in enumerate(scores):
            energy, convergence = energy_of(score), convergence_of(score)
            values: dict[str, Any] = score.as_json(audit_score(score))
            results[name][f"set {number}"] = {**values, "runs": [[*run.values()] for run in values["runs"][:12]]}
            results[name][f"energy {number}"] = vars(energy) if energy else None
            results[name][f"convergence {number}"] = convergence and [
                json.loads(json.dumps(convergence, default=plain_json)), report_of(convergence).as_json()
            ]  # fmt: skip
    factors = [read_scaling(write_files(tmp_path / str(number), scaled(text))) for number, text in enumerate(FACTORS)]
    recorded("sets.json", {**results, "factors": [[scaling.factor, scaling.flag] for scaling in factors]})


VALUES = ("score_minutes", "scaling_factor", "official_minutes", "converged", "flags")


@pytest.mark.slow
def test_public_sets_of_v60(tmp_path: Path, recorded: Record) -> None:
    # Complete sets of v6.0, the last run of one was cut; data/PROVENANCE.md has their source. Each log's verdict is
    # that of mlperf-logging, each factor that of the set's scaling.json, if it has one
    with tarfile.open(GOLDEN / "v6.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    scores, reports = score_and_check(tmp_path)
    checked = {
        report.path: mlp_compliance.make_checker("training", "6.0.0", True, False).check_file(
            str(report.path), "training_6.0.0/common.yaml"
        )
        for report in reports
    }
    assert {report.path: report.passed for report in reports} == checked
    cells = {(cell.name, cell.benchmark): cell for cell in load_published() if cell.round == "v6.0"}
    results: dict[str, Any] = {}
    for score in scores:
        submitter, _, system, benchmark = score.folder.parts[-4:]
        cell, convergence = cells.pop((f"v6.0/{submitter}/{system}", benchmark)), convergence_of(score)
        # AMD's scaling.json could not be read: the factor is that of the reference points
        official = score.official_minutes or score.score_minutes * convergence.factor
        assert (cell.score_minutes, cell.official_minutes) == pytest.approx((score.score_minutes, official), abs=1e-4)
        assert score.scaling_factor in (None, convergence.factor)
        findings = audit_score(score)
        values = score.as_json(findings)
        results[f"{submitter} {benchmark}"] = {
            **{key: values[key] for key in VALUES}, "convergence": convergence.explanation,
            "audit": sorted({finding.rule for finding in findings}),
        }  # fmt: skip
        printed = output_of("compare", score.folder, cell.name, "--all", width=120)
        results[f"compare {submitter}"] = [" ".join(line.split()) for line in printed.splitlines()[:12]]
    results["checks"] = Counter(f"{item.found} ({item.severity})" for report in reports for item in report.findings)
    recorded("v6.0.json", results)
    # Of the other sets only run times or scores could be read
    assert {cell.note.split(" ")[0] for cell in cells.values()} == {"run", "summary.json"} and len(cells) == 33
    for system, count in (("vultr/8xMI355X_2xEPYC_9575F", 10), ("Quanta_Cloud_Technology/D75H-10U", 1)):
        sample = published_set(cells[f"v6.0/{system}", "llama2_70b_lora"]).score
        assert (sample.count, sample.spread is None) == (count, count == 1)
        assert "unknown for" in output_of("compare", scores[0].folder, f"v6.0/{system}", "--all", width=120)
    assert make_digests([str(tmp_path / "training_results_v6.0"), "-o", str(tmp_path)]) == 0
    made, kept = (lzma.decompress((path / "v6.0.jsonl.xz").read_bytes()) for path in (tmp_path / "digests", DIGESTS))
    assert made == kept


# --- rules ------------------------------------------------------------------------------------------------


def without(key: str, text: str = resnet_v07()) -> str:
    return re.sub(rf'^.*"key": "{key}".*\n', "", text, flags=re.MULTILINE)


_SMALL = {"train_samples": 1437, "eval_samples": 360}
_EARLY = mllog("tracked_stats", {"warmup_time": 12.5}, START_MS - 50)
_LINES = resnet_v07().splitlines(keepends=True)
_V05 = resnet_v05().splitlines(keepends=True)
CHECKS: dict[str, str | tuple[str, str]] = {
    "good": resnet_v07(),
    "another text first": "some text\n" * 7 + resnet_v07(sgd_opt_end_learning_rate=0.001),
    "small data": resnet_v07(quality=(0.9, 0.95), **_SMALL),
    # Only a run that reached its own target is excused by small data.
    "small data, target of its own": resnet_v07(quality=(0.3, 0.5), **_SMALL),
    "small data, open": resnet_v07(quality=(0.3, 0.5), submission_division="open", **_SMALL),
    "small data, aborted": resnet_v07(quality=(0.3, 0.5), status="aborted", **_SMALL),
    "small data, killed": without("run_stop", resnet_v07(quality=(0.3, 0.5), **_SMALL)),
    "missed": resnet_v07(quality=(0.3, 0.75899995)),
    "no log": "no log\n",
    "no such ruleset": (resnet_v07(), "0.8.0"),
    **{
        f"v6.1 no {key}": without(key, flux1_v61())
        for key in ("lowest_numerical_precision_in_attn", "expert_parallelism", "config_filename")
    },
    "times of warm-up are no data": resnet_v07().replace(mllog("run_start"), _EARLY + mllog("run_start")),
    **{
        f"{key} {'before' if late < 0 else 'after'} the clock": resnet_v07().replace(
            mllog("run_start"), mllog(key, None, START_MS + late, epoch_num=1) + mllog("run_start")
        )
        for key in ("epoch_start", "eval_start")
        for late in (-50, 50)
    },
    **{
        f"no {key}": without(key)
        for key in ("global_batch_size", "submission_org", "cache_clear", "eval_samples", "sgd_opt_momentum", "seed")
    },
    "every line": resnet_v07().replace('"epoch_num": 4', '"epoch": 4'),
    "submitter logged twice": resnet_v07() + mllog("submission_org", "Encore"),
    "a long initialization": re.sub(r'\d+(, "event_type": "POINT_IN_TIME", "key": "init_start")', r"0\1", resnet_v07()),
    "two events on one line": "".join(_LINES[:3]) + _LINES[3].strip() + _LINES[4] + "".join(_LINES[5:]),
    "a damaged event": resnet_v07() + ':::MLLOG {"namespace": "", "time_ms": 15926\n',
    "the checker breaks": resnet_v07().replace("0.7605", '"high"'),
    "caches not cleared": resnet_v07(cache_clear=False),
    "init_stop after run_start": resnet_v07().replace(mllog("run_start"), mllog("run_start", None, START_MS - 9000)),
    "caches cleared in 1973": mllog("cache_clear", True, 111_111_111_111) + without("cache_clear"),
    "clock in seconds, no round": re.sub(r'("time_ms": \d{10})\d{3}', r"\1", resnet_v07()).replace("resnet", "rgat"),
    "caches cleared late": without("cache_clear") + mllog("cache_clear", True, START_MS + 9),
    "no submitter": resnet_v07(submission_org="SUBMISSION_ORG_PLACEHOLDER"),
    # The keys are those of v0.7, the date is that of v5.1.
    "date of another round": resnet_v07(start_ms=1_762_000_000_000),
    "evaluated too seldom": resnet_v07().replace('"epoch_num": 8', '"epoch_num": 12'),
    "no round": resnet_v07(start_ms=LONG_AFTER_MS) + GRADIENTS,
    "ruleset of people": (resnet_v07(), "v0.7"),
    "no times": re.sub(r'"time_ms": \d+', '"time_ms": null', resnet_v07()),
    # Its rule files have no target.
    "v0.6": v06(evaluated(0.7), benchmark="resnet"),
    "v0.5": resnet_v05(),
    "v0.5 written twice": "".join(f"INFO:mlperf_compliance:{line}{line}" for line in _V05),
    "v0.5 model before the clock": "".join([_V05[0], _V05[3], *_V05[1:3], *_V05[4:]]),
    "v0.5 no caches": resnet_v05().replace("run_clear_caches", "run_nothing"),
    "v0.5 caches not cleared": resnet_v05().replace("run_clear_caches", "run_clear_caches: false"),
    "v0.5 caches cleared late": "".join([*_V05[1:], _V05[0]]),
    "v0.5 no loop": resnet_v05().replace("train_loop", "loop"),
    "v0.5 another target": resnet_v05().replace("eval_target: 0.749", "eval_target: 0.7"),
    "v0.5 missed": resnet_v05().replace('"value": 0.7497', '"value": 0.7'),
    "v0.5 two stops": resnet_v05() + v05("run_stop", seconds=1_541_740_000.0),
    "v0.5 another form": resnet_v05().replace('{"epoch": 61, "value": 0.7497}', "0.7497"),
    "v0.5 stop before start": resnet_v05(-1.0),
    "v0.5 no end": "".join(line for line in _V05 if "run_final" not in line and "random" not in line),
    # Sample counts of public sets that are not small, and of some that are.
    **{
        f"{benchmark} {round_} {train} {evaluate}": (
            log_of(
                benchmark, at(0, "train_samples", train), at(0, "eval_samples", evaluate),
                at(0, "global_batch_size", batch),
            ),
            round_,
        )
        for benchmark, round_, train, evaluate, batch in (
            ("ssd", "v3.0", 4571, 97, 256), ("ssd", "v2.0", 1_170_301, 24_781, 256), ("ssd", "v2.0", 500, 97, 256),
            ("ssd", "v0.7", 4572, 97, 256), ("retinanet", "v5.0", 1143, 2, 1024),
            ("resnet", "v3.0", 1_281_167, 49_999, 3264),
            ("resnet", "v1.0", 1_281_167, 390, 8192), ("resnet", "v0.7", 1_277_952, 51_200, 4096),
            ("resnet", "v0.7", 1_277_951, 51_200, 4096), ("resnet", "v0.7", 1_281_167, 5_000, 4096),
            ("dlrm", "v2.0", 3_495_680_000, 89_137_319, 51_200), ("dlrm", "v2.0", 349_568_000, 89_137_319, 51_200),
            # Their logs count otherwise.
            ("maskrcnn", "v0.7", 118_287, 5_000, 96), ("maskrcnn", "v0.7", 40_000, 1, 96),
            ("maskrcnn", "v0.7", 64, 16, 96), ("minigo", "v0.7", 8_192, 256, 1), ("minigo", "v0.7", None, None, 1),
            ("minigo", "v0.7", 256, 64, 1),
        )
    },
}  # fmt: skip


SMALL_DATA = ("ssd", "resnet", "dlrm", "retinanet", "maskrcnn", "minigo")


def test_checks(tmp_path: Path, recorded: Record, long_after: None) -> None:
    results: dict[str, Any] = {}
    for name, content in CHECKS.items():
        text, ruleset = content if isinstance(content, tuple) else (content, None)
        try:
            report = check(write_set(tmp_path, [text]) / "result_0.txt", ruleset)
        except EncoreError as error:
            results[name] = [error.found, error.expected, error.hint]
        else:
            # The checker sorts alternative events in any order
            alternatives = re.compile(r"_(?:start|stop) or ")
            findings = [[*asdict(item).values()][:-2] for item in report.findings if not alternatives.search(item.rule)]
            if name.startswith(SMALL_DATA):
                findings = [item for item in findings if "small_data" in item]
            verdict = [report.ruleset, report.ruleset_found, report.passed, report.passed_but_for_data]
            results[name] = {"report": verdict, "findings": findings}
    recorded("checks.json", results)


# --- comparisons ------------------------------------------------------------------------------------------

_PASSPORT = {
    "round": "v0.7", "nodes": 1, "ranks_per_node": 2, "runtime": "host", "environment": {"NCCL_DEBUG": "INFO"},
    "code": {"commit": "a" * 40}, "data": {"name": "digits", "id": "1"},
    "configuration": {"precision": {"value": "fp32", "origin": "default"}, "kernels": {"value": "auto"}},
    "choices": {
        "0": {"kernels": {"gather": "triton"}, "tf32": {"matmul": False}}, "1": {"kernels": {"gather": "plain"}},
    },
    "deviations": [{"text": "another batch"}],
}  # fmt: skip
_CPU = {"submission": {"kind": "small"}, "nodes": 1, "ranks_per_node": 2, "round": "v0.7"}
_STUDY = {"round": "v0.7", "submission": {"kind": "study", "submitted": False, "of": "x", "text": "not submitted"}}
_STATED = {
    "round": "v0.7",
    "submission": {"submitted": True, "of": "training_results_v0.7/NVIDIA/dgxa100_ngc20.06_mxnet"},
}
_OTHER = timed_log(62, 3.3, global_batch_size=3328, opt_name="lars", sgd_opt_weight_decay=5e-5, seed=7)


def system(**described: object) -> dict[str, str]:
    return {"system.json": json.dumps(described)}


COMPARISONS: dict[str, tuple[Mapping[str, str | bytes], str | None]] = {
    "reproduced": (files(a100_texts()), A100),
    "faster": (files(a100_texts(30.0)), A100),
    "slower": (files(a100_texts(60.0)), A100),
    "undecided": (files(a100_texts(41.5)), A100),
    "more epochs": (files(a100_texts(54.6, epochs=56)), A100),
    "fewer epochs": (files(a100_texts(27.3, epochs=28)), A100),
    "wild": (files(a100_texts(spread=12.0)), A100),
    "one run": (files(a100_texts(runs=1)), A100),
    "three runs": (files(a100_texts(runs=3)), A100),
    "missed": (files([resnet_v07(40.0, quality=(0.3, 0.7), start_ms=START_MS + n) for n in range(5)]), A100),
    "V100": (files(a100_texts(submission_platform="1xNVIDIA DGX-1")), A100),
    "16 accelerators": (files(a100_texts(submission_platform="2xNVIDIA DGX A100")), A100),
    "small data": (files(a100_texts(train_samples=1500)), A100),
    "another target": (files([resnet_v05(134.0 + n) for n in range(5)]), "v0.6/NVIDIA/dgx1_ngc19.05_mxnet"),
    "CPU": (
        files(
            a100_texts(0.3, 1, epochs=12, train_samples=1500),
            **system(accelerators_per_node="0"),
            **{"run.json": json.dumps(_CPU)},
        ),
        None,
    ),
    "a study": (files(a100_texts(), **{"run.json": json.dumps(_STUDY)}), None),
    "stated": (files(a100_texts(submission_platform="box"), **{"run.json": json.dumps(_STATED)}), None),
    "nearest": (files(a100_texts()), None),
    "own platform": (files(a100_texts(submission_org="NVIDIA")), None),
    # A name and a part of it: only the first is the system.
    **{
        f"platform {platform}": (files(a100_texts(submission_org="NVIDIA", submission_platform=platform)), None)
        for platform in ("dgxa100_n2", "dgxa100_n")
    },
    "unknown hardware": (files(a100_texts(submission_platform="box", global_batch_size=1632)), None),
    # The time does not choose the submission.
    **{
        f"unknown hardware, {minutes} minutes": (
            files(a100_texts(minutes, spread=0.004 * minutes, submission_platform="box", global_batch_size=1632)),
            None,
        )
        for minutes in (105.5, 0.77)
    },
    "unknown hardware, named": (files(a100_texts(submission_platform="box")), A100),
    "one crashed": (
        files([*a100_texts()[:4], "".join(a100_texts()[4].splitlines(keepends=True)[:-1])], **scaled(1.19)),
        A100,
    ),
    "copies": (
        files(
            [
                re.sub(
                    r'("time_ms": )(\d+)', lambda m, n=n: f"{m[1]}{int(m[2]) + 3_600_000 * n}", a100_texts(runs=1)[0]
                )
                for n in range(5)
            ]
        ),
        A100,
    ),
    "one in seconds": (
        files(
            [
                re.sub(r'"time_ms": (\d+)\d{3}', r'"time_ms": \1', text) if n == 2 else text
                for n, text in enumerate(a100_texts())
            ]
        ),
        A100,
    ),
    # The score drops a run whose start was moved; means of all runs do not.
    "one start moved": (
        files(
            [
                re.sub(r'("time_ms": )\d+([^\n]*"key": "run_start")', rf"\g<1>{START_MS + 1_800_000}\2", text)
                if n == 0
                else text
                for n, text in enumerate(a100_texts())
            ]
        ),
        A100,
    ),
    "all in seconds": (files([re.sub(r'("time_ms": \d{10})\d{3}', r"\1", text) for text in a100_texts()]), A100),
    "official": (files(dell_texts(), **scaled(1.0042)), DELL),
    "raw": (files(dell_texts()), DELL),
    "a passport": (files([timed_log(60, 3)], **{"run.json": json.dumps(_PASSPORT)}), A100),
    "another configuration": (
        files(
            [_OTHER],
            **system(
                framework="NGC MXNet 20.06",
                accelerators_per_node=8,
                accelerator_model_name="A100-PCIe",
                host_processor_model_name="EPYC",
                number_of_nodes=1,
                other_software_stack=[{"cuda_version": "11.3"}],
            ),
        ),
        A100,
    ),
    "epochs numbered from 0": (files([numbered(0)]), None),
    "an unreadable description": (
        {
            "NVIDIA/results/dgxa100_ngc20.06_mxnet/resnet/result_0.txt": _FIVE[0],
            "NVIDIA/systems/dgxa100_ngc20.06_mxnet.json": "see the other file\n",
        },
        None,
    ),
    "gpt3": (
        files(
            [
                resnet_v07(
                    minutes,
                    quality=(2.8, 2.68),
                    start_ms=1_683_000_012_345 + n,
                    submission_benchmark="gpt3",
                    gradient_accumulation_steps=1,
                )
                for n, minutes in enumerate((64.1, 64.3, 64.2))
            ]
        ),
        None,
    ),
    "nothing known": (files([mllog("run_start")]), None),
    # NCF of v0.5 scores the first 50 of 100 runs that converge, and says so in words of its own.
    "ncf, too few": (files([ncf(5 * number) for number in range(100)]), None),
}


def test_comparisons(tmp_path: Path, recorded: Record) -> None:
    # Verdict, factors and confidence of each comparison, and the differences of the sides
    results: dict[str, Any] = {}
    for name, (content, submission) in COMPARISONS.items():
        side = load_run_set(write_files(tmp_path / file_of(name), content))
        result = compare(side, submission)
        explanation = explain(result.current, result.baseline) if result.baseline else None
        differences = explanation.differences[:20] if explanation else ()
        results[name] = {
            **json.loads(json.dumps(result.as_json(), default=plain_json)),
            "findings": sorted({item.rule for item in side.findings}),
            "sure": [*format_certainty(result)],
            "differences": [[item.area, item.sentence, item.weight, item.ratio] for item in differences],
            "unknown": explanation.unknown if explanation else (),
        }
    recorded("comparisons.json", results)
    printed = output_of("compare", tmp_path / "another-configuration", A100, width=130)
    recorded("comparison.txt", printed.partition("\n")[2])
