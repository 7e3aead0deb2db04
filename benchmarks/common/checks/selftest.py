"""Check an implementation on this machine: GPU code paths must train to the same losses.

    $ python -m benchmarks.common.checks.selftest benchmarks.ncf.pytorch --config small.json --data DATA --work WORK \
        --list
    $ python -m benchmarks.common.checks.selftest benchmarks.ncf.pytorch --config small.json --data DATA --work WORK \
        --check precision=bf16

A check trains the toy data set for two epochs with the unmodified ``train.py`` in a separate process, and compares
the losses with those of a reference training: the first steps individually, where rounding errors have not grown
yet, and the mean of each epoch. WORK caches the losses, so that several checks share a training. The last line of
the output is JSON: ``result`` (OK, FAIL or SKIPPED), ``found`` and ``lines``, the last lines of a failed training.
An implementation's selftest.py defines its :class:`Suite`.
"""

import argparse
import dataclasses
import hashlib
import importlib
import json
import math
import shutil
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, get_args, get_type_hints

from benchmarks.common.checks import bench as bench_loops
from benchmarks.common.checks.agreement import Losses, Result, Tolerance, compare_losses, read_losses, truncate_losses
from benchmarks.common.checks.trainings import EXIT_SECONDS, Failed, Skipped, interrupt, launcher, run
from benchmarks.common.data import manifest

EPOCHS = 2
IMAGES = {"gpu": 512, "cpu": 64}  # JPEGs of real size that are generated
ENOUGH_EPOCHS = 8  # the input may end with its last epoch, and there are few images
ONLY_ON_GPU = ("cuda_graph", "kernels")  # prefixes of checks that would compare a CPU with itself
CPU_STEPS = 50  # minimum steps on a CPU for a comparison, unless the training is shorter


@dataclass(frozen=True)
class Suite:
    module: str  # package with train.py and config.py
    device: Tolerance  # between a GPU and a CPU, in fp32
    two_ranks: Tolerance  # between two ranks and one
    resume: Tolerance  # between an interrupted and an uninterrupted training
    # Fields whose other values must train to the same losses, or single values as FIELD=VALUE, with tolerances
    varied: Mapping[str, Tolerance]
    left_out: Tuple[str, ...] = ()  # FIELD=VALUE that are not varied
    # Settings of all trainings here, in addition to the small configuration.
    settings: Mapping[str, Any] = field(default_factory=dict)
    # Modules whose exit code is 0 if the check passes, by check name
    programs: Mapping[str, str] = field(default_factory=dict)
    steps: int = 20  # that all GPUs must make together at least
    fewer_steps: int = 0  # maximum number of missing steps per epoch on two ranks
    shares_gpu: str = ""  # why two ranks cannot share a GPU; empty where they can, through Gloo
    # Writes a data set with real sizes for bench.py; None if the toy data set suffices
    real_sizes: Optional[Callable[[Path], None]] = None
    # The same with JPEGs of real size, whose input pipeline must keep up with the step
    real_images: Optional[Callable[[Path, int], None]] = None
    # Why a submitted system's batch is not evaluated on a CPU; empty if it is
    no_cpu_evaluation: str = "a batch takes minutes on a CPU"
    slow_on_cpu: Tuple[str, ...] = ()  # checks that take minutes on a CPU

    @property
    def config_class(self) -> Any:
        return importlib.import_module(f"{self.module}.config").Config

    def write_real(self, folder: Path, images: int) -> bool:
        """Write a data set with real sizes; return whether the suite has one."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.real_images is not None:
            self.real_images(folder, images)
        elif self.real_sizes is not None:
            self.real_sizes(folder)
        return bool(self.real_images or self.real_sizes)


class Bench:
    """A suite's trainings on this machine."""

    def __init__(self, suite: Suite, arguments: argparse.Namespace) -> None:
        self.suite, self.data, self.work = suite, arguments.data, arguments.work
        self.device, self.gpus = arguments.device, arguments.gpus
        self.launch, self.launch_all = launcher(arguments.launch), launcher(arguments.launch_all)
        full = arguments.full
        self.full: Optional[Dict[str, Any]] = None if full is None else json.loads(full.read_text(encoding="utf-8"))
        self.base = base_of(suite, json.loads(arguments.config.read_text(encoding="utf-8")), self.device)

    def command(self, settings: Mapping[str, Any], name: str, launch: Sequence[str] = ()) -> Tuple[List[str], Path]:
        """Return a training's command and folder; the folder has only the configuration."""
        values = {**self.base, **settings}
        try:
            self.suite.config_class(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
        except ValueError as problem:
            raise Skipped(str(problem)) from None
        folder, options = self.folder(f"{name}-{_hash(json.dumps(values))[:8]}", values)
        options += ["--data", str(self.data), "--output", str(folder)]
        return [*launch, sys.executable, "-m", f"{self.suite.module}.train", *options], folder

    def folder(self, name: str, config: Optional[Mapping[str, Any]] = None) -> Tuple[Path, List[str]]:
        """Return an empty folder, with a configuration in it if one is given, and the options that name that."""
        folder: Path = self.work / name
        shutil.rmtree(str(folder), ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return folder, ["--config", str(folder / "config.json")]

    def losses(
        self,
        settings: Mapping[str, Any],
        name: str = "training",
        launch: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Losses:
        """Train, unless cached by an earlier check; return the loss of every step by epoch."""
        key = _hash(repr((sorted(settings.items()), list(launch), sorted(environment.items()))))
        cache = self.work / f"losses-{key[:16]}.json"
        if not cache.exists():
            command, folder = self.command(settings, name, launch)
            run(command, folder, environment)
            cache.write_text(json.dumps(read_losses(folder)), encoding="utf-8")
        return [[(count, loss) for count, loss in epoch] for epoch in json.loads(cache.read_text(encoding="utf-8"))]

    def measured(self, name: str, config: Mapping[str, Any], loops: Sequence[str], steps: int) -> Dict[str, float]:
        """Return the samples per second of loops of bench.py on data of real sizes, as far as a CPU can."""
        folder, options = self.folder(name, config)
        self.suite.write_real(self.work / f"{name}-data", IMAGES["cpu"])
        options += ["--data", str(self.work / f"{name}-data"), "--steps", str(steps), "--repeats", "1", "--any-data"]
        run([sys.executable, "-m", f"{self.suite.module}.bench", *options, "--only", *loops], folder, {})
        printed = (folder / "output.txt").read_text(encoding="utf-8").splitlines()
        loop_results = json.loads([line for line in printed if line.startswith("{")][-1])["measured"]
        return {loop: measurement["median"] for loop, measurement in loop_results.items()}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def base_of(suite: Suite, small: Mapping[str, Any], device: str) -> Dict[str, Any]:
    """Return the configuration of all trainings: the small one, with the settings of the suite."""
    base = {**small, "device": device, "epochs": EPOCHS, "log_interval": 1, "checkpoint_interval": 0}
    return {**base, **{name: value for name, value in suite.settings.items() if name in base}}


def write_manifest(folder: Path, benchmark: str, counts: Mapping[str, int], facts: Mapping[str, Any]) -> None:
    splits = {name: {"count": count, "files": []} for name, count in counts.items()}
    content = {"name": "noise", "benchmark": benchmark, "classes": [], "splits": splits, "facts": facts, "how": {}}
    manifest.write(content, folder)


Check = Callable[[Bench], Result]


# -- the checks --------------------------------------------------------------------------------------


def alternatives(config_class: Any, name: str) -> Tuple[Any, ...]:
    """Return a field's possible values, except "auto"."""
    annotation = get_type_hints(config_class)[name]
    return (False, True) if annotation is bool else tuple(value for value in get_args(annotation) if value != "auto")


def variants(suite: Suite, base: Mapping[str, Any]) -> Dict[str, Tuple[Dict[str, Any], Tolerance]]:
    """Return the settings that must train like ``base``, by ``FIELD=VALUE``, with tolerances."""
    settings: Dict[str, Tuple[Dict[str, Any], Tolerance]] = {}
    for entry, tolerance in suite.varied.items():
        name, _, text = entry.partition("=")
        for value in [parse_value(suite.config_class, name, text)] if text else alternatives(suite.config_class, name):
            label = f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            if value != base[name] and label not in suite.left_out:
                settings[label] = ({name: value, **needed(suite, name, value)}, tolerance)
    return settings


# Settings that a non-default field value requires, by FIELD=VALUE
NEEDED: Mapping[str, Mapping[str, Any]] = {
    "fp8=scaled_mm": {"precision": "bf16"},
    "attention=cudnn": {"precision": "bf16"},
    "attention=flash": {"precision": "bf16"},
}


def parse_value(config_class: Any, name: str, text: str) -> Any:
    """Convert ``text`` to a field value: one of the choices, or the field's type."""
    annotation = get_type_hints(config_class)[name]
    return text if text in get_args(annotation) else annotation(text)


def needed(suite: Suite, name: str, value: Any) -> Dict[str, Any]:
    """Return the settings that a value requires. fp16 needs a loss scale, or gradients in a small network underflow."""
    if f"{name}={value}" in NEEDED:
        return dict(NEEDED[f"{name}={value}"])
    return {"loss_scale": defaults(suite)["loss_scale"]} if (name, value) == ("precision", "fp16") else {}


def defaults(suite: Suite) -> Dict[str, Any]:
    return {config_field.name: config_field.default for config_field in dataclasses.fields(suite.config_class)}


def with_defaults(suite: Suite) -> Dict[str, Any]:
    """Return the defaults of all varied fields; a submitted system sets what is "auto" here."""
    settings = {name: value for name, value in defaults(suite).items() if name in suite.varied}
    return {**settings, **needed(suite, "precision", settings.get("precision"))}


def gpu_defaults(bench: Bench) -> Result:
    """Check the defaults of all varied fields together."""
    if bench.device == "cpu":
        raise Skipped("needs a GPU")
    settings = with_defaults(bench.suite)
    tolerance = Tolerance(*map(max, zip(*bench.suite.varied.values())))
    result = compare_losses(bench.losses(settings), bench.losses({}), tolerance)
    summary = ", ".join(f"{name}={value}" for name, value in settings.items())
    return dataclasses.replace(result, found=f"{summary}: {result.found}")


def device(bench: Bench) -> Result:
    """Compare a GPU with a CPU, or a CPU with itself using a different number of threads."""
    # A small network is slower with as many threads as cores.
    environment = {"OMP_NUM_THREADS": "2" if bench.device == "cpu" else "4"}
    command, folder = bench.command({"device": "cpu"}, "cpu")
    # A CPU need not finish: differences appear in the first steps, and grow.
    interrupt(command, folder, CPU_STEPS, environment)
    other = read_losses(folder)
    return compare_losses(truncate_losses(other, bench.losses({})), other, bench.suite.device)


def variant(settings: Mapping[str, Any], tolerance: Tolerance, bench: Bench) -> Result:
    return compare_losses(bench.losses(settings), bench.losses({}), tolerance)


def overflow(bench: Bench) -> Result:
    """Let the loss overflow: the run must stop with an error."""
    # CPUs lack fp16; fp32 overflows as well.
    settings: Dict[str, Any] = {"learning_rate": 1e30}
    if bench.device == "gpu" and "fp16" in alternatives(bench.suite.config_class, "precision"):
        settings["precision"] = "fp16"
        # A dynamic scale would need one step for each halving.
        if not any(name.startswith("loss_scale_") for name in defaults(bench.suite)):
            settings["loss_scale"] = 1e30
    try:
        losses = bench.losses(settings, "overflow")
    except Failed as end:
        message = next((line for line in end.lines if "not finite" in line), None)
        return Result("OK", message.strip()) if message else Result("FAIL", str(end), end.lines)
    return Result("FAIL", f"the training finished, its last loss {losses[-1][-1]}")


def resume(bench: Bench) -> Result:
    """Interrupt a training in its first steps and resume it; compare with an uninterrupted one."""
    command, folder = bench.command({}, "resume")
    interrupt(command, folder)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    if json.loads(lines[-1]).get("outcome") != "interrupted":
        raise Skipped("the training finished before it could be interrupted")
    run(command, folder, {})
    return compare_losses(read_losses(folder), bench.losses({}), bench.suite.resume)


def two_ranks(bench: Bench) -> Result:
    """Compare two ranks of half the batch with one; on a single GPU they share it."""
    if not bench.launch:
        raise Skipped("no launcher: name one with --launch")
    environment = {}
    if bench.device == "gpu" and bench.gpus < 2:
        if bench.suite.shares_gpu:
            raise Skipped(f"one GPU: {bench.suite.shares_gpu}")
        environment["ENCORE_BACKEND"] = "gloo"
    settings = {"batch_size": bench.base["batch_size"] // 2}
    losses = bench.losses(settings, "two-ranks", bench.launch, environment)
    return compare_losses(losses, bench.losses({}), bench.suite.two_ranks, bench.suite.fewer_steps)


def on_all_gpus(bench: Bench) -> Result:
    """Train as submitted on all GPUs, on a CPU on two ranks: every process must end soon after the training."""
    ranks = bench.gpus if bench.device == "gpu" else 2
    if ranks > 1 and not bench.launch_all:
        raise Skipped("no launcher: name one with --launch-all")
    settings = with_defaults(bench.suite) if bench.device == "gpu" else {}
    if ranks > 1:
        settings["batch_size"] = bench.base["batch_size"] // 2
    if ranks > 2:
        # The same number of steps as on two ranks.
        settings["epochs"] = bench.base["epochs"] * -(-ranks // 2)
    losses = bench.losses(settings, "all-ranks", bench.launch_all)
    steps = sum(count for epoch in losses for count, _ in epoch)
    summary = f"{ranks} {'rank' if ranks == 1 else 'ranks'}, {steps} steps"
    if steps < bench.suite.steps:
        return Result("FAIL", f"{summary}: at least {bench.suite.steps} are needed")
    if not all(math.isfinite(loss) for epoch in losses for _, loss in epoch):
        return Result("FAIL", f"{summary}: a loss is not finite")
    overrides = "".join(f", {name}={value}" for name, value in settings.items())
    return Result("OK", f"{summary}, ended within {EXIT_SECONDS:.0f} s of the training's end{overrides}")


def evaluation(bench: Bench) -> Result:
    """Evaluate synthetic batches with a submitted system's network; on a GPU, bench.py does this."""
    if bench.device == "cpu" and bench.suite.no_cpu_evaluation:
        raise Skipped(bench.suite.no_cpu_evaluation)
    if bench.full is None:
        raise Skipped("no submitted system: name one with --full")
    # The submitted system determines what is computed, the small configuration how.
    how = {"device", "loss_scale", *(entry.partition("=")[0] for entry in bench.suite.varied)}
    config = {**bench.full, **{name: value for name, value in bench.base.items() if name in how}}
    speed = bench.measured("evaluation", config, [bench_loops.EVALUATION], 1)[bench_loops.EVALUATION]
    return Result("OK", f"{speed:,.0f} samples/s with the full network")


def real_input(bench: Bench) -> Result:
    """Read JPEGs of real size; the step is the small network's, which no rate of the input is compared with."""
    config = {**bench.base, "epochs": ENOUGH_EPOCHS}
    speeds = bench.measured("input", config, ["synthetic", "input"], bench_loops.READ_AHEAD)
    read, step = speeds["input"], speeds["synthetic"]
    return Result("OK", f"{read:,.0f} images/s of real size; the small network's step takes {step:,.0f}")


def program(module: str, bench: Bench) -> Result:
    """Run a module that checks itself; its last line is the finding."""
    folder, _ = bench.folder(module)
    run([sys.executable, "-m", module], folder, {})
    lines = (folder / "output.txt").read_text(encoding="utf-8").strip().splitlines()
    return Result("OK", lines[-1] if lines else "")


# Checks of every implementation, the most informative first
FIXED: Mapping[str, Check] = {
    "device": device,
    "defaults": gpu_defaults,
    "defaults on all GPUs": on_all_gpus,
    "overflow": overflow,
    "resume": resume,
    "two ranks": two_ranks,
    "evaluation": evaluation,
}


def checks(suite: Suite, base: Mapping[str, Any]) -> Dict[str, Check]:
    return {
        **FIXED,
        **({"input": real_input} if suite.real_images is not None else {}),
        **{name: partial(program, module) for name, module in suite.programs.items()},
        **{name: partial(variant, *arguments) for name, arguments in variants(suite, base).items()},
    }


def check(bench: Bench, name: str) -> Result:
    if bench.device == "cpu" and name.startswith(ONLY_ON_GPU):
        return Result("SKIPPED", "needs a GPU")
    if bench.device == "cpu" and name in bench.suite.slow_on_cpu:
        return Result("SKIPPED", "takes minutes on a CPU")
    try:
        return checks(bench.suite, bench.base)[name](bench)
    except Skipped as reason:
        return Result("SKIPPED", str(reason))
    except Failed as problem:
        return Result("FAIL", str(problem), problem.lines)


def suite_of(module: str) -> Suite:
    """Return the suite of the implementation in package ``module``."""
    return importlib.import_module(f"{module}.selftest").SUITE


def main(argv: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="package of an implementation, such as benchmarks.ncf.pytorch")
    parser.add_argument("--config", type=Path, required=True, help="resolved small configuration (JSON)")
    parser.add_argument("--data", type=Path, required=True, help="folder of the prepared small data set")
    parser.add_argument("--work", type=Path, required=True, help="folder for the trainings")
    parser.add_argument("--full", type=Path, help="resolved configuration of a submitted system (JSON)")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--gpus", type=int, default=1, help="number of available GPUs")
    parser.add_argument("--launch", default="", help="command prefix that starts a training on two ranks")
    parser.add_argument("--launch-all", default="", help="the same for one rank per GPU; on a CPU for two ranks")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="print the names of the checks as JSON")
    action.add_argument("--real-sizes", type=Path, metavar="DIR", help="write the data set for bench.py, if any")
    action.add_argument("--check", metavar="NAME", help="run this check")
    arguments = parser.parse_args(argv)
    suite = suite_of(arguments.module)
    bench = Bench(suite, arguments)
    names = list(checks(suite, bench.base))
    if arguments.list:
        print(json.dumps(names))
        return 0
    if arguments.real_sizes is not None:
        print(json.dumps(suite.write_real(arguments.real_sizes, IMAGES["gpu"])))
        return 0
    if arguments.check not in names:
        parser.error(f"no check {arguments.check!r}: one of {', '.join(names)}")
    arguments.work.mkdir(parents=True, exist_ok=True)
    print(json.dumps(dataclasses.asdict(check(bench, arguments.check))))
    return 0


def check_names(small: Mapping[str, Mapping[str, Any]]) -> Dict[str, List[str]]:
    """Return the names of the GPU checks by module; ``small``: configuration per module."""
    suites = {module: suite_of(module) for module in small}
    return {module: list(checks(suite, base_of(suite, small[module], "gpu"))) for module, suite in suites.items()}


if __name__ == "__main__":
    sys.exit(main())
