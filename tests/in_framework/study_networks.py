"""Layers, weights and output shapes of the study's networks at given sizes of images, as JSON."""

import json
import sys

from benchmarks.study.mxnet.networks import build, describe

found = {}
for wanted in sys.argv[1:]:
    name, image, classes = wanted.split(":")
    network = build(name, int(classes), int(image))
    found[wanted] = describe(network, (2, 3, int(image), int(image)))
    operators = [node["op"] for node in json.loads(network.tojson())["nodes"]]
    found[wanted]["operators"] = [operator for operator in operators if operator != "null"]
    found[wanted]["arrays"] = len(found[wanted].pop("sizes"))
print(json.dumps(found))
