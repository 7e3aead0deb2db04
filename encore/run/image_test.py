"""Image tests for `make test-image-BENCHMARK`."""

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from encore import catalogue, configuration, data, paths
from encore.containers import building, engines, images, renderers, runtimes
from encore.errors import EncoreError, ExitCode
from encore.run import planning, run_metadata, runner, supervise

LABELS = (
    "org.opencontainers.image.revision",
    "org.opencontainers.image.base.name",
    "encore.benchmark",
    "encore.framework",
    "encore.code",
)


def run(choice: catalogue.Choice, engine: engines.Engine) -> Iterator[tuple[str, str]]:
    # Yield pairs (test name, problem); the problem is empty if the test passed.
    image = engines.inspect(engine, building.image_name(choice))
    if image is None:
        raise building.not_built(choice, engine.name)
    missing = [name for name in LABELS if image.labels.get(name, "unknown") == "unknown"]
    yield "labels", f"missing: {', '.join(missing)}" if missing else ""
    yield "user", "the image's user is root" if image.user in ("", "0", "root") else ""
    yield from _python_checks(
        choice, runtimes.Target(runtime=engine.name, engine=engine, image=building.image_name(choice), image_info=image)
    )
    yield from _image_check(choice, engine)
    yield "no secrets", _secrets(choice, engine)
    yield "training", _training(choice, engine)


def _python_checks(choice: catalogue.Choice, target: runtimes.Target) -> Iterator[tuple[str, str]]:
    # Report failed imports and versions that differ from the pins.
    info = runtimes.query_python(target, choice, {}).python_info
    if info is None:
        yield "imports", "the image's Python did not answer"
        return
    yield "imports", "; ".join(f"{name}: {error}" for name, error in info.problems.items())
    allowed: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w-]+)==([\w.]+)", pinned(choice), re.MULTILINE):
        allowed.setdefault(name.lower().replace("_", "-"), set()).add(version)
    versions = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in info.packages.items()}
    wrong = [
        f"{name} {versions.get(name, 'missing')}" for name, pins in allowed.items() if versions.get(name) not in pins
    ]
    yield "versions", f"not as pinned: {', '.join(wrong)}" if wrong else ""


def _run_in_image(
    choice: catalogue.Choice, engine: engines.Engine, *command: str, options: Sequence[str] = ()
) -> tuple[str, str]:
    # Return a command's output in the image, and the error.
    run = [engine.program, "run", "--rm", "--pull", "never", *options]
    done = engines.ask([*run, building.image_name(choice), *command], timeout=300)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return done.stdout, lines[-1] if done.returncode else ""


def _image_check(choice: catalogue.Choice, engine: engines.Engine) -> Iterator[tuple[str, str]]:
    # Framework checks that need the image and its GPUs, with the last line of output.
    module = catalogue.framework(choice.implementation.framework).image_check
    if module:
        output, problem = _run_in_image(
            choice, engine, "python", "-m", module, options=renderers.GPU_OPTIONS[engine.gpu_access]
        )
        last = output.strip().splitlines()[-1:] if not problem else []
        yield (
            " ".join([module.rsplit(".", 1)[-1].replace("_", " "), *(f"({line})" for line in last)]),
            problem,
        )


def pinned(choice: catalogue.Choice) -> str:
    return (paths.REQUIREMENTS / images.find_row(choice).requirements).read_text(encoding="utf-8")


def _secrets(choice: catalogue.Choice, engine: engines.Engine) -> str:
    # Search the image's environment and history for secrets.
    history = engines.ask(
        [engine.program, "history", "--no-trunc", "--format", "{{.CreatedBy}}", building.image_name(choice)]
    )
    variables, problem = _run_in_image(choice, engine, "env")
    # An engine may pass the host's proxy into every container.
    settings = [line.partition("=") for line in variables.splitlines() if "_proxy=" not in line.lower()]
    suspects = [name for name, _, value in settings if run_metadata.is_secret(name, value)]
    suspects += [match[0] for match in run_metadata.LOGIN.finditer(history.stdout)]
    return problem or (f"looks like a secret: {', '.join(suspects)}" if suspects else "")


def _training(choice: catalogue.Choice, engine: engines.Engine) -> str:
    # Train one epoch on the toy data set, with everything that a run does.
    with tempfile.TemporaryDirectory(prefix="encore-image-test-") as temporary:
        # With warm-up, the single epoch would be warm-up only.
        has_warmup = "warmup_epochs" in configuration.field_types(choice.folder)
        request = planning.Request(
            name=choice.name,
            gpus=1,
            system=choice.benchmark.small_data.system,
            results=Path(temporary) / "results",
            settings=("epochs=1", *(["warmup_epochs=0"] if has_warmup else [])),
            runtime=engine.name,
        )
        plan = planning.query_python(planning.make_plan(request, small_data=Path(temporary) / choice.benchmark.name))
        quiet = runner.Hooks(
            step=lambda text: None,
            prepare_data=lambda directory, python: data.prepare(directory.name, directory, data.Preparation(), python),
            experiment=lambda experiment: None,
            progress=lambda progress: None,
            finished=lambda experiment, outcome: None,
        )
        try:
            run = runner.prepare_and_create(plan, quiet)
            code = runner.execute(plan, run, quiet, supervise.Limits(hang_seconds=120.0)).code
        except EncoreError as error:
            return str(error)
        return "" if code in (ExitCode.REACHED, ExitCode.NOT_REACHED) else run.experiments()[0].state().reason
