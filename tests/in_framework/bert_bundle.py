"""Read TensorFlow's checkpoint that bert_tensorflow.py wrote, without TensorFlow, and damaged copies of it."""

import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.bert.pytorch.model import Network
from benchmarks.common.data.problem import Problem
from benchmarks.language import tensorflow_bundle
from benchmarks.language.pytorch import checkpoint
from benchmarks.language.pytorch.encoder import Shape
from benchmarks.language.tensorflow_bundle import Bundle, crc32c

BIG = "bert/big/adam_m"


def said(index):
    """What is said of a damaged copy."""
    try:
        Bundle(index).read(BIG)
    except Problem as problem:
        return str(problem)
    return ""


def damaged(folder, name, change):
    """Copy the checkpoint with one file changed."""
    target = folder / name
    target.mkdir()
    for path in folder.glob("model.ckpt-3.*"):
        (target / path.name).write_bytes(path.read_bytes())
    change(target)
    return said(target / "model.ckpt-3.index")


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(bytes(content))


def crcs():
    """RFC 3720's example, and whether long texts have the CRC that the loop over bytes finds."""
    random = np.random.RandomState(0)
    texts = [random.bytes(tensorflow_bundle.LANES * 8 + extra) for extra in (0, 1, 5)]
    plain = [tensorflow_bundle._by_bytes(text, 0xFFFFFFFF) ^ 0xFFFFFFFF for text in texts]
    return [crc32c(b"123456789"), [crc32c(text) for text in texts] == plain]


def main(folder):
    index = folder / "model.ckpt-3.index"
    bundle, values = Bundle(index), np.load(folder / "values.npz")
    network = Network(Shape(2, 64, 2, 128, 104, 64), "grouped")
    checkpoint.fill(checkpoint.places_of(network.state_dict()), checkpoint.read(index), index)
    query = network.encoder.layers[1].qkv.weight.detach().numpy()[:64]
    loaded = np.array_equal(query, values["bert|encoder|layer_1|attention|self|query|kernel"].T)
    data = "model.ckpt-3.data-00000-of-00001"
    entry = bundle.entries[BIG]
    found = {
        "tensors": len(bundle.entries),
        "equal": all(np.array_equal(bundle.read(name.replace("|", "/")), values[name]) for name in values),
        "loaded": bool(loaded),
        "crc": crcs(),
        "data": damaged(folder, "data", lambda target: flip(target / data, entry.offset + 5)),
        "index": damaged(folder, "index", lambda target: flip(target / index.name, 20)),
        "short": damaged(folder, "short", lambda target: (target / index.name).write_bytes(b"none")),
        "gone": damaged(folder, "gone", lambda target: (target / data).unlink()),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
