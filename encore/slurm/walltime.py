"""How long a job will take, from the published time of its configuration."""

import math
from dataclasses import dataclass

from encore.configuration import Configuration
from encore.results.published.published import PublishedResult, load_published

MARGIN = 2.0  # own hardware, file system and luck with the seed; Slurm kills at the limit, and waits for none
SETUP_MINUTES = 20  # pulling an image, starting it, reading the data set for the first time, evaluation before the end
SMALL_MINUTES = 15  # a small data set on a few cores, set-up of the framework's environment included


@dataclass(frozen=True)
class Estimate:
    """A time limit in whole minutes, and how it came about."""

    minutes: int | None
    reason: str


def estimate(configuration: Configuration, runs: int) -> Estimate:
    """Return the time limit for ``runs`` runs one after the other; None where nothing was published."""
    system = configuration.system
    if system.kind == "small":
        return Estimate(SMALL_MINUTES * (1 + runs), f"{SMALL_MINUTES} min a run of the toy data set, and set-up")
    cell = _published(configuration)
    if cell is None or cell.score_minutes is None:
        return Estimate(None, "no published time of this configuration: the partition's own limit holds")
    submitted = system.nodes * system.gpus_per_node
    scaled = cell.score_minutes * submitted / configuration.ranks
    minutes = SETUP_MINUTES + math.ceil(MARGIN * scaled * runs)
    reason = f"{cell.name} took {cell.score_minutes:.4g} min on {submitted} GPUs; times {MARGIN:g}, {runs} run(s)"
    return Estimate(minutes, f"{reason}, {configuration.ranks} GPUs, and {SETUP_MINUTES} min for set-up")


def _published(configuration: Configuration) -> PublishedResult | None:
    system, benchmark = configuration.system, configuration.choice.benchmark.name
    wanted = (system.round, benchmark, system.submission.rsplit("/", 1)[-1])
    scored = (cell for cell in load_published() if cell.score_minutes is not None)
    return next((cell for cell in scored if (cell.round, cell.benchmark, cell.system) == wanted), None)
