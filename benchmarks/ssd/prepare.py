"""Prepare SSD's data set: COCO's images and annotations with a manifest, or check a prepared one.

    $ python -m benchmarks.ssd.prepare -o data/ssd                          # the toy data set
    $ python -m benchmarks.ssd.prepare /raw/coco -o /data/coco      # COCO 2017, folders or zips
    $ python -m benchmarks.ssd.prepare --verify /data/coco

Writes the files that benchmarks/detection/annotations.py describes and, last, dataset.json. Give an interrupted command
again and it continues. Exit code 0: done; 2: refused, nothing was changed; 1: broke on the way; 130: interrupted.
"""

from functools import partial

from benchmarks.common.data import prepare
from benchmarks.detection.preparation import data_set

DATA_SET = data_set("ssd")
main = partial(prepare.main, DATA_SET)


if __name__ == "__main__":
    raise SystemExit(main())
