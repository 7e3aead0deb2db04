"""Prepare gpt-oss-20b's data set. Llama 3.1 8B uses the same data: prepare it once for both.

    $ python -m benchmarks.gpt_oss_20b.prepare -o data/gpt-oss-20b                       # the toy data set
    $ python -m benchmarks.gpt_oss_20b.prepare /raw/c4 -o /data/c4 --tokenizer tokenizer.json
    $ python -m benchmarks.gpt_oss_20b.prepare --verify /data/c4

For options, files and exit codes see benchmarks/llama31_8b/prepare.py.
"""

from functools import partial

from benchmarks.common.data import prepare
from benchmarks.llama.preparation import data_set

DATA_SET = data_set("gpt-oss-20b")
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
