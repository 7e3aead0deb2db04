"""Prepare the Transformer's data set: indexed sentences with a manifest, or check a prepared one.

    $ python -m benchmarks.transformer.prepare -o data/transformer                          # the toy data set
    $ python -m benchmarks.transformer.prepare /raw/wmt -o /data/wmt        # WMT's archives
    $ python -m benchmarks.transformer.prepare /raw/text -o /data/text      # train.en train.de test.en test.de
    $ python -m benchmarks.transformer.prepare --verify /data/wmt

Writes the files that benchmarks/translation/arrays.py describes and, last, dataset.json. Give an interrupted command
again and it continues. Exit code 0: done; 2: refused, nothing was changed; 1: failed; 130: interrupted.
"""

from functools import partial

from benchmarks.common.data import prepare
from benchmarks.translation.preparation import data_set

DATA_SET = data_set("transformer", corpus="wmt17", tokens="auto")
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
