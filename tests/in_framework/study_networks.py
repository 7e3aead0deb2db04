"""Layers, weights and output shapes of the study's networks at given sizes of images, as JSON."""

import json
import sys

from benchmarks.study.mxnet.networks import build, describe

found = {}
for wanted in sys.argv[1:]:
    name, image, classes = wanted.split(":")
    found[wanted] = describe(build(name, int(classes), int(image)), (2, 3, int(image), int(image)))
    found[wanted]["arrays"] = len(found[wanted].pop("sizes"))
print(json.dumps(found))
