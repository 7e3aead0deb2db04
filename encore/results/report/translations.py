"""The translations of a run: the best and the worst sentences of its last evaluation.

from encore.results.report.translations import translations_table
print(translations_table(Path("results/20260101T120000Z-transformer-pytorch-cpu")).as_markdown())
"""

from pathlib import Path

from pydantic import BaseModel, Field

from encore.results.report.shown import first_read
from encore.results.table import Cell, Table

FILE = "translations.jsonl"  # In the folder of an experiment: one JSON object per sentence of the test set
SHOWN = 5  # Sentences at each end
LONGEST = 300  # Characters of a text that are shown
_MOST_LINES = 100_000
_LONGEST_LINE = 1 << 16


class Translation(BaseModel):
    """A sentence of the test set and what was made of it."""

    index: int
    source: str
    hypothesis: str
    reference: str
    bleu: float = Field(allow_inf_nan=False)  # Of this sentence alone, 0 to 100: not what a run is judged by
    # Agreement of characters, 0 to 100; distinguishes sentences without four words of the reference.
    chrf: float = Field(allow_inf_nan=False)
    epoch: int


def translations_table(folder: Path | None) -> Table | None:
    """Return the best and the worst translations of the first experiment that has some; None without any."""
    path, every = first_read(folder, FILE, Translation, _MOST_LINES, _LONGEST_LINE)
    if not every:
        return None
    found = sorted(every, key=lambda each: (-each.bleu, -each.chrf, each.index))
    best = [_row("best", each) for each in found[:SHOWN]]
    worst = [_row("worst", each) for each in reversed(found[SHOWN:][-SHOWN:])]
    number = path.parent.name.rpartition("_")[2]
    return Table(
        title="Translations, best and worst by BLEU and chrF of the sentence",
        columns=("which", "sentence", "BLEU", "chrF", "source", "translation", "reference"),
        formats={"BLEU": ".1f", "chrF": ".1f"},
        rows=(*best, *worst),
        note=f"Of {len(found):,} after epoch {found[0].epoch} of result_{number}.txt. BLEU of a sentence is no "
        f"quality of the run. Texts longer than {LONGEST} characters are cut.",
    )


def _row(which: str, each: Translation) -> tuple[Cell, ...]:
    source, hypothesis, reference = map(_shown, (each.source, each.hypothesis, each.reference))
    return which, each.index + 1, each.bleu, each.chrf, source, hypothesis, reference


# Text on one line, cut, without characters that control a terminal or turn the direction of writing.
def _shown(text: str) -> str:
    printable = "".join(each if each.isprintable() else " " for each in text[: 4 * LONGEST])
    line = " ".join(printable.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
