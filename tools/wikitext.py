"""Convert WikiText articles to JSON lines for `encore data prepare llama31-8b`, one document per article.

    python -m tools.wikitext wiki.valid.raw wiki.test.raw -o DIR --held-out 0.25

The last articles, ``--held-out`` of the last file, are for evaluation, all others for training.
"""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from tools import run

TITLE = re.compile(r"(?m)^(?= = [^=].* = $)")


def articles(path: Path) -> list[str]:
    return [text.strip() for text in TITLE.split(path.read_text(encoding="utf-8")) if text.strip()]


def main(
    files: Annotated[list[Path], typer.Argument(help="WikiText's .raw or .tokens files.")],
    to: Annotated[Path, typer.Option("-o", "--output", help="Folder of train.jsonl and test.jsonl.")],
    held_out: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of the last file's letters.")] = 0.25,
) -> None:
    """Write the articles."""
    *training_files, last = [articles(path) for path in files]
    first, held_out_size = len(last), held_out * sum(map(len, last))
    while sum(map(len, last[first:])) < held_out_size:
        first -= 1
    to.mkdir(parents=True, exist_ok=True)
    parts = {
        "train": [*(text for file_articles in training_files for text in file_articles), *last[:first]],
        "test": last[first:],
    }
    for name, texts in parts.items():
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        (to / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{name}: {len(texts)} articles, {sum(map(len, texts)):,} letters")


if __name__ == "__main__":
    run(main, __doc__)
