"""Prepare the fine-tuning data of Llama 2 70B: packed samples with a manifest, or check a prepared data set.

    $ python -m benchmarks.llama2_70b_lora.prepare -o data/llama2-70b-lora              # the toy data set, with a base
    $ python -m benchmarks.llama2_70b_lora.prepare /raw/gov_report -o /data/gov_report  # MLPerf's packed samples
    $ python -m benchmarks.llama2_70b_lora.prepare /raw/text -o /data/text --tokenizer tokenizer.json
    $ python -m benchmarks.llama2_70b_lora.prepare --verify /data/gov_report

Writes the files that benchmarks/llama2_70b_lora/dataset.py describes and, last, dataset.json. Give an interrupted
command again and it starts over. Exit code 0: done; 2: refused, nothing was changed; 1: failed; 130: interrupted.
"""

import argparse
from functools import partial
from pathlib import Path

from benchmarks.common.data import prepare

ARRAYS = tuple(f"{part}_{each}.npy" for part in ("train", "test") for each in ("tokens", "counts"))

OPTIONAL = ("tokenizer.json", "base.safetensors")


def _add_options(options: argparse._ArgumentGroup) -> None:
    add = options.add_argument
    add("--tokenizer", type=Path, metavar="FILE", help="tokenizer.json of the model; default: that of the source")
    add(
        "--sequence-length",
        type=prepare.number(16, 1 << 20),
        metavar="N",
        help="tokens of a sample that texts are packed to; default: 8,192, of the toy data set 256",
    )
    add(
        "--vocabulary-size",
        type=prepare.number(2, 1 << 20),
        metavar="N",
        help="entries of the vocabulary of packed samples without a tokenizer; default: 32,000",
    )


DATA_SET = prepare.DataSet(
    benchmark="llama2-70b-lora",
    source="folder of train and validation as .parquet or .jsonl: packed samples, or texts with summaries",
    files=(*ARRAYS, *OPTIONAL),
    optional=OPTIONAL,
    add_options=_add_options,
    writer="benchmarks.llama2_70b_lora.writer",
    samples="benchmarks.llama2_70b_lora.samples",
    check=prepare.opens("benchmarks.llama2_70b_lora.dataset"),
)
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
