"""Small logs in each dialect, in the form of the public ones."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

START_MS = 1_592_669_288_183


# One event of v0.7 and later.
def mllog(key: str, value: object = None, time_ms: float = START_MS, **metadata: object) -> str:
    record = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": "POINT_IN_TIME",
        "key": key,
        "value": value,
        "metadata": {"file": "train.py", "lineno": 1, **metadata},
    }
    return f":::MLLOG {json.dumps(record)}\n"


# Log that mlperf-logging's checker passes under ruleset 0.7.0; ``changed`` replaces values by key.
def resnet_v07(
    minutes: float = 40.0,
    *,
    quality: tuple[float, ...] = (0.35, 0.7605),
    status: str = "success",
    start_ms: int = START_MS,
    train_samples: int = 1_281_167,
    eval_samples: int = 50_000,
    **changed: object,
) -> str:
    values = {
        "submission_benchmark": "resnet",
        "submission_org": "Encore",
        "submission_division": "closed",
        "submission_status": "onprem",
        "submission_platform": "1xCPU",
        "cache_clear": True,
        "init_start": None,
        "seed": 30267,
        "model_bn_span": 208,
        "global_batch_size": 1664,
        "opt_name": "sgd",
        "sgd_opt_base_learning_rate": 6.0,
        "sgd_opt_end_learning_rate": 0.0001,
        "sgd_opt_learning_rate_decay_poly_power": 2,
        "sgd_opt_learning_rate_decay_steps": 42,
        "sgd_opt_weight_decay": 2.5e-05,
        "sgd_opt_momentum": 0.9,
        "opt_learning_rate_warmup_epochs": 5,
        "init_stop": None,
    }
    before = start_ms - 2000
    text = "".join(mllog(key, changed.get(key, value), before) for key, value in values.items())
    text += mllog("run_start", time_ms=start_ms)
    text += mllog("train_samples", train_samples, start_ms) + mllog("eval_samples", eval_samples, start_ms)
    step = minutes * 60_000 / max(len(quality), 1)
    for number, accuracy in enumerate(quality):
        first, epoch = 4 * number + 1, 4 * (number + 1)
        begin, end = round(start_ms + number * step), round(start_ms + (number + 1) * step)
        text += (
            mllog("block_start", time_ms=begin, first_epoch_num=first, epoch_count=4)
            + mllog("epoch_start", time_ms=begin, epoch_num=epoch)
            + mllog("epoch_stop", time_ms=end - 1, epoch_num=epoch)
            + mllog("eval_start", time_ms=end - 1, epoch_num=epoch)
            + mllog("eval_stop", time_ms=end, epoch_num=epoch)
            + mllog("eval_accuracy", accuracy, end, epoch_num=epoch)
            + mllog("block_stop", time_ms=end, first_epoch_num=first)
        )
    return text + mllog("run_stop", time_ms=round(start_ms + minutes * 60_000), status=status)


# Events that mlperf-logging's checker requires of Flux.1 under ruleset 6.1.0.
FLUX1_V61 = {
    "submission_benchmark": "flux1",
    "submission_org": "Encore",
    "submission_division": "closed",
    "submission_status": "onprem",
    "submission_platform": "1xCPU",
    "cache_clear": True,
    "init_start": None,
    "seed": 30267,
    "global_batch_size": 512,
    "gradient_accumulation_steps": 1,
    "evaluation_frequency": 262_144,
    "train_samples": 1_099_776,
    "eval_samples": 29_696,
    "opt_name": "adamw",
    "opt_adamw_beta_1": 0.9,
    "opt_adamw_beta_2": 0.95,
    "opt_adamw_epsilon": 1e-8,
    "opt_adamw_weight_decay": 0.1,
    "opt_base_learning_rate": 2e-4,
    "opt_learning_rate_warmup_steps": 0,
    "opt_gradient_clip_norm": 1.0,
    "lowest_numerical_precision_in_linear": "fp8",
    "lowest_numerical_precision_in_attn": "bfloat16",
    "lowest_numerical_precision_in_comm": "bfloat16",
    "tensor_parallelism": 1,
    "pipeline_parallelism": 1,
    "context_parallelism": 1,
    "expert_parallelism": 1,
    "micro_batch_size": 64,
    "config_filename": "config_1x8x64.sh",
    "init_stop": None,
}


# Log that mlperf-logging's checker passes under ruleset 6.1.0; ``changed`` replaces values by key.
def flux1_v61(minutes: float = 40.0, *, evaluations: int = 28, **changed: object) -> str:
    start_ms = 1_790_000_000_000
    text = "".join(mllog(key, changed.get(key, value), start_ms - 2000) for key, value in FLUX1_V61.items())
    text += mllog("run_start", time_ms=start_ms)
    for number in range(1, evaluations + 1):
        end, samples = round(start_ms + number * minutes * 60_000 / evaluations), 262_144 * number
        text += (
            mllog("block_start", time_ms=end - 2, samples_count=samples - 262_144)
            + mllog("block_stop", time_ms=end - 1, samples_count=samples)
            + mllog("eval_start", time_ms=end - 1, samples_count=samples)
            + mllog("eval_accuracy", 0.586 + 0.001 * (evaluations - number), end, samples_count=samples)
            + mllog("eval_stop", time_ms=end, samples_count=samples)
        )
    return text + mllog("run_stop", time_ms=round(start_ms + minutes * 60_000), status="success", samples_count=0)


# One event of v0.5.
def v05(key: str, value: str = "", seconds: float = 1_541_720_386.718659639, benchmark: str = "resnet") -> str:
    return f":::MLPv0.5.0 {benchmark} {seconds:.9f} (/workspace/log_utils.py:49) {key}{value and ': ' + value}\n"


# Log of v0.5 as NVIDIA's, without a status in run_stop.
def resnet_v05(minutes: float = 134.0, quality: float = 0.7497, stop: str = "") -> str:
    start = 1_541_720_386.718659639
    end = start + minutes * 60
    return (
        v05("run_clear_caches", seconds=start - 3)
        + v05("run_start", seconds=start)
        + v05("run_set_random_seed", "14209", start)
        + v05("model_hp_initial_shape", "[4, 224, 224]", start + 1)
        + v05("input_batch_size", "208", start + 1)
        + v05("eval_target", "0.749", start + 30)
        + v05("train_loop", seconds=start + 31)
        + v05("train_epoch", "0", start + 31)
        + v05("eval_start", seconds=end - 6)
        + v05("eval_accuracy", f'{{"epoch": 61, "value": {quality}}}', end - 1)
        + v05("eval_stop", seconds=end - 1)
        + v05("run_stop", stop, end)
        + v05("run_final", seconds=end + 1)
    )


# One event of v0.6.
def mll(key: str, value: object = None, seconds: float = 1_560_881_731.835, **metadata: object) -> str:
    return f":::MLL {seconds:.3f} {key}: {json.dumps({'value': value, 'metadata': metadata})}\n"


# Files by their path in ``folder``. A list becomes JSON lines, in which a text is written as it is; other values JSON.
def write_files(folder: Path, files: Mapping[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if isinstance(content, list):
            content = "".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in content)
        data = content if isinstance(content, str | bytes) else json.dumps(content)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode(errors="surrogateescape"))
    return folder


# Folder with the texts as result_0.txt, result_1.txt ...
def write_set(folder: Path, texts: Sequence[str]) -> Path:
    return write_files(folder, {f"result_{number}.txt": text for number, text in enumerate(texts)})


# Synthetic log with its first evaluation some milliseconds later; without it the audit reports copies.
def uneven(text: str, number: int) -> str:
    return re.sub(
        r'("time_ms": )(\d+)([^\n]*"key": "eval_accuracy")',
        lambda match: f"{match[1]}{int(match[2]) + 37 * number * number}{match[3]}",
        text,
        count=1,
    )


# Short log, by default in the months of v2.0.
def log_of(benchmark: str, *middle: str, start_ms: int = 1_640_000_000_000, minutes: float = 40.0) -> str:
    end = mllog("run_stop", None, round(start_ms + minutes * 60_000), status="success")
    begin = (mllog("submission_benchmark", benchmark, start_ms - 1000), mllog("run_start", None, start_ms))
    return "".join((*begin, *middle, end))


# Runs of NVIDIA's DGX A100 by their platform: evaluations every 4 epochs, the last one reaches the target.
def a100_texts(
    minutes: float = 39.8, runs: int = 5, spread: float = 0.4, epochs: int = 40, **changed: object
) -> list[str]:
    values: dict[str, object] = {
        "submission_org": "MyLab", "submission_platform": "1xNVIDIA DGX A100", "global_batch_size": 3264, **changed,
    }  # fmt: skip
    texts = [
        resnet_v07(
            minutes + spread * (n - (runs - 1) / 2),
            quality=(*(0.3 + 0.01 * k + 0.001 * n for k in range(epochs // 4 - 1)), 0.7605),
            start_ms=START_MS + 10**7 * n,
            **{"seed": 100 + n, **values},
        )
        for n in range(runs)
    ]
    return [uneven(text, n) for n, text in enumerate(texts)]


# Short ResNet logs of v4.0 with times from a public set, for scores and reference points.
def dell_texts(epochs: tuple[float, ...] = (35,) * 5, batch: int = 3200) -> list[str]:
    texts = []
    for number, minutes in enumerate((13.148, 13.159, 13.161, 13.168, 13.3)):
        start = 1_714_000_000_123 + number * 10**7
        middle = (
            mllog("submission_division", "closed", start),
            mllog("global_batch_size", batch, start),
            mllog("gradient_accumulation_steps", 1, start),
            mllog("seed", 5 + number, start),
            mllog("eval_accuracy", 0.7, start + 5, epoch_num=epochs[number] - 4),
            mllog("eval_accuracy", 0.7595, round(start + minutes * 60_000), epoch_num=epochs[number]),
        )
        texts.append(uneven(log_of("resnet", *middle, start_ms=start, minutes=minutes), number))
    return texts


# Node's log with a reading each second.
def power_log(watts: list[float], *, start_ms: int = START_MS, efficiency: float = 0.9, stop: bool = True) -> str:
    text = mllog("power_measurement_start", None, start_ms) + mllog("conversion_eff", efficiency, start_ms)
    text += "".join(mllog("power_reading", value, start_ms + 1000 * number) for number, value in enumerate(watts, 1))
    return text + mllog("power_measurement_stop", None, start_ms + 1000 * len(watts)) * stop


# Log with these seconds of start, and per epoch of training and evaluation.
def timed_log(train_s: float, evaluate_s: float, epochs: int = 4, start_s: float = 5.0, **values: object) -> str:
    text, now = "", START_MS + start_s * 1000
    for epoch in range(1, epochs + 1):
        end, after = now + train_s * 1000, now + (train_s + evaluate_s) * 1000
        times = {"epoch_start": now, "epoch_stop": end, "eval_start": end, "eval_stop": after}
        text += "".join(mllog(key, None, at, epoch_num=epoch) for key, at in times.items())
        text += mllog("eval_accuracy", 0.5 if epoch < epochs else 0.761, after, epoch_num=epoch)
        now = after
    head = resnet_v07(1.0, quality=(), **values).splitlines(keepends=True)
    return "".join(head[:-1]) + text + mllog("run_stop", None, now, status="success")


# A log that is cut, or has a part removed, inserted, repeated, flipped or copied from elsewhere
def mutate(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(1, 3)):
        start, source, length = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1), rng.randint(0, 60)
        part = data[start : start + length]
        flipped = bytes(byte ^ (1 << rng.randrange(8)) for byte in part[:2]) + part[2:]
        copied = data[source : source + length] + part
        changed = rng.choice((b"", rng.randbytes(length) + part, part + part, flipped, copied))
        data = data[:start] + changed + data[rng.choice((start + length,) * 5 + (len(data),)) :]
    return data
