"""The report of a study: its questions with their answers, how far its passes are apart, and why.

from encore.lab.studies.page import build
from encore.results.report.report import write_files
write_files(build(open_folder(path, Study)), path / "report")
"""

from collections.abc import Sequence
from statistics import fmean

from encore.errors import EncoreError
from encore.lab.scaling.printed_tables import checks
from encore.lab.studies import traffic
from encore.lab.studies.answers import answer
from encore.lab.studies.definition import Study
from encore.lab.studies.folder import Folder
from encore.lab.studies.results import Result, read
from encore.results.report.report import Chapter, Report
from encore.results.statistics import LEVEL
from encore.results.table import Table, shown
from encore.results.words import percent


def build(folder: Folder[Study]) -> Report:
    """Read the points that are done, and answer the study's questions."""
    study, results = folder.study, read(folder)
    if not results:
        raise EncoreError(f"no point of {folder.path} is measured", hint="encore study run --resume FOLDER")
    mark = _mark(study)
    note = "Measured on CPUs or on a small grid." if mark else ""
    reasons = tuple((each.text, each.why) for each in study.questions if each.why)
    spread = f"Intervals ({percent(LEVEL)}) are {_intervals(results)}."
    return Report(
        title=study.title,
        about=f"{study.about} Points: {folder.summary()}. {_machine(folder.machine())}.",
        notices=tuple(filter(None, (mark, _busy(results)))),
        chapters=(
            *(answer(study, each, results, number, note) for number, each in enumerate(study.questions, 1)),
            Chapter(
                key="passes",
                title="How far the passes are apart",
                sentence=spread,
                folded=(_passes(study, results),),
            ),
            Chapter(key="why", title="Why", tables=tuple(_why(study, results)), terms=reasons),
            *_inconsistent(study),
        ),
    )


def _mark(study: Study) -> str:
    if study.base.get("device") != "cpu":
        return "The small grid: not the study's points." if study.is_small else ""
    return (
        "Measured on CPUs, which stand in for GPUs: small images, small batches, resident memory for GPU memory. "
        "Nothing here says how GPUs behave, and nothing is a reproduction of a printed figure."
    )


def _busy(results: Sequence[Result]) -> str:
    busy = [each.others for each in results if each.is_disturbed and each.others]
    if not busy:
        return ""
    used, cores = max(busy)
    return (
        f"The machine was busy: at {len(busy)} of {len(results)} points other programs took up to {used:.1f} of {cores}"
        " cores. Their times, and all that is made of them, may be wrong by much; measure them again with nothing else"
        " running."
    )


def _intervals(results: Sequence[Result]) -> str:
    apart = results[0].drift
    if apart is None:
        return "from the blocks of steps of one process: what drifts between two points is not in them"
    return (
        f"from the passes: two of one point differ by {100 * apart.cv:.1f} % (standard deviation, pooled over"
        f" {apart.freedom} repeats; a point's own where that is more). The first pass is in the grid's order, the"
        " others are shuffled"
    )


def _passes(study: Study, results: Sequence[Result]) -> Table:
    names = list(study.grid)
    rows = []
    for each in results:
        if each.is_timed:
            means = [fmean(one["step_seconds"]) for one in each.passes]
            missing = [None] * (study.passes - len(means))
            apart = max(means) / min(means) if len(means) > 1 else None
            rows.append(
                (*(each.axes[name] for name in names), *means, *missing, apart, each.others[0] if each.others else None)
            )
    numbers = [f"pass {number}, s a step" for number in range(1, study.passes + 1)]
    columns = (*names, *numbers, "longest over shortest", "cores of other programs")
    return Table(title="Every point and its passes", columns=columns, rows=tuple(rows)).filled()


def _machine(machine: dict[str, object]) -> str:
    gpus = machine.get("gpus") or []
    names = sorted({str(each.get("name")) for each in gpus}) if isinstance(gpus, list) else []
    cpu = machine.get("cpu_model") or machine.get("cpu") or "CPU"
    return f"{len(gpus) if isinstance(gpus, list) else 0} GPUs ({', '.join(names)}), {cpu}" if names else str(cpu)


def _why(study: Study, results: Sequence[Result]) -> list[Table]:
    # Layers, weights, gradient bytes, and what the links carry.
    networks = {str(each.axes.get("network", "")): each for each in results}
    rows = tuple(
        (
            name, each.found["network"]["convolutions"], each.found["network"]["fully_connected"],
            len(each.found["network"]["sizes"]), each.found["network"]["weights"], each.gradient_bytes / 1e6,
            "x".join(map(str, each.found["network"]["output"][1:])),
        )
        for name, each in networks.items()
    )  # fmt: skip
    columns = ("network", "convolutions", "fully connected", "arrays", "weights", "gradients, MB", "output")
    found = [Table(title="What an update has to move", columns=columns, rows=rows)]
    if study.links:
        links = traffic.links_of(study.links)
        sizes = {
            name: [4 * int(size) for size in each.found["network"]["sizes"].values()] for name, each in networks.items()
        }
        found.append(traffic.table(links, sizes, links.gpus))
    return found


def _inconsistent(study: Study) -> list[Chapter]:
    # Which printed figures of this study do not follow from its others.
    if study.published is None:
        return []
    ours = [each for each in checks() if each.source == study.published.source]
    failing = [each for each in ours if not each.follows]
    table = Table(
        title=f"Printed figures of the study that do not follow from its others: {len(failing)} of {len(ours)}",
        columns=("place", "figure", "printed", "computed", "note"),
        rows=tuple((each.place, each.what, each.printed, shown(each.computed), each.note) for each in failing),
    )
    return [Chapter(key="printed", title="The study's printed figures", tables=(table,))]
