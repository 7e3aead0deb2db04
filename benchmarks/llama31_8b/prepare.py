"""Prepare Llama's pretraining data: token ids with a manifest, or check a prepared data set.

    $ python -m benchmarks.llama31_8b.prepare -o data/llama31-8b                        # the toy data set
    $ python -m benchmarks.llama31_8b.prepare /raw/c4 -o /data/c4 --tokenizer tokenizer.json  # MLPerf's .bin and .idx
    $ python -m benchmarks.llama31_8b.prepare /raw/text -o /data/text --tokenizer tokenizer.json
    $ python -m benchmarks.llama31_8b.prepare --verify /data/c4

Writes the files that benchmarks/llama/megatron.py describes and, last, dataset.json. Give an interrupted command again
and it continues. Exit code 0: done; 2: refused, nothing was changed; 1: failed; 130: interrupted.
"""

from functools import partial

from benchmarks.common.data import prepare
from benchmarks.llama.preparation import data_set

DATA_SET = data_set("llama31-8b")
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
