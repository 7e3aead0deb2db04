"""Tolerances between trainings of ResNet on the toy data set, and synthetic images in ImageNet's size, for all
selftest.py.

Epoch 2 has losses of 1.94, 2.03 and 1.90 with three seeds and 1.87 in bf16 (PyTorch, CPU); an untrained network has
2.30. bf16 differs by 0.03 % in the first steps.
"""

import tempfile
from pathlib import Path

from benchmarks.common.checks.agreement import Tolerance
from benchmarks.common.data import prepare
from benchmarks.common.data.synthetic_images import jpegs
from benchmarks.resnet.prepare import DATA_SET

ROUNDED = Tolerance(0.01, 0.08)  # the same weights and images with a different precision, layout or summation order
# Ranks normalize with local statistics; or the device's generator initializes the weights, like a different seed (1.99
# and 1.77 in TensorFlow).
ANOTHER_BATCH = Tolerance(0.1, 0.13)


WIDTH, HEIGHT = 500, 375  # usual size of ImageNet images in pixels
CLASSES = 8
EVALUATED = 32


def real_images(folder: Path, count: int) -> None:
    """Prepare ``count`` images to train on, of classes that they do not show."""
    with tempfile.TemporaryDirectory(dir=str(folder.parent)) as raw:
        for seed, (part, images) in enumerate((("train", count), ("val", EVALUATED))):
            for number, data in enumerate(jpegs(images, WIDTH, HEIGHT, seed)):
                folder_of_class = Path(raw) / part / f"c{number % CLASSES}"
                folder_of_class.mkdir(parents=True, exist_ok=True)
                (folder_of_class / f"{number}.jpg").write_bytes(data)
        code = prepare.main(DATA_SET, [raw, "-o", str(folder), "--trust", "--progress", "json"])
    if code != 0:
        raise SystemExit(code)
