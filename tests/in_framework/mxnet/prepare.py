"""ResNet's toy data set, and what DALI decodes of images of every kind."""

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from benchmarks.common.data import manifest as manifests
from benchmarks.common.data.recordio import read_index, read_record, unpack
from benchmarks.resnet.prepare import check, main

DALI = pytest.importorskip("nvidia.dali")


def records(folder, split):
    # Labels and image bytes of a split in their order.
    with (folder / f"{split}.rec").open("rb") as file:
        return [unpack(read_record(file, offset)) for _, offset in read_index(folder / f"{split}.idx")]


def picture(random):
    small = (random.rand(6, 8, 3) * 255).astype("uint8")
    return Image.fromarray(small).resize((160, 120), Image.BICUBIC)


def test_the_toy_data_set(tmp_path):
    assert main(["-o", str(tmp_path)]) == 0
    manifest = manifests.read(tmp_path)
    assert (manifest["name"], manifest["benchmark"], "".join(manifest["classes"])) == ("digits", "resnet", "0123456789")
    assert manifests.verify(tmp_path, check=check) == []
    train, held = records(tmp_path, "train"), records(tmp_path, "val")
    assert (len(train), len(held), len({image for _, image in (*train, *held)})) == (1500, 297, 1797)
    assert set(Counter(label for label, _ in held).values()) <= {29, 30}
    names = ["dataset.json", "train.idx", "train.rec", "val.idx", "val.rec"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def test_odd_images_become_what_dali_decodes(tmp_path):
    odd, random = tmp_path / "source" / "val" / "all", np.random.RandomState(1)
    odd.mkdir(parents=True)
    image = picture(random)
    for shift in range(4):
        image.save(odd / f"magic{shift}.jpg", comment=b"x" * shift + bytes.fromhex("0a23d7ce") * 3)
    image.save(odd / "progressive.jpg", progressive=True)
    modes = {"gray.jpg": "L", "cmyk.jpg": "CMYK", "rgb.png": "RGB", "palette.gif": "P", "alpha.webp": "RGBA"}
    for name, mode in modes.items():
        image.convert(mode).save(odd / name)
    image.save(odd / "png_inside.JPEG", "PNG")
    image.save(odd / "moving.gif", save_all=True, append_images=[picture(random)])
    Image.fromarray(np.asarray(image.convert("L")).astype("uint16") * 256).save(odd / "deep.png")
    for folder in ("val/more", "train/all", "train/more"):
        (tmp_path / "source" / folder).mkdir(parents=True)
        picture(random).save(tmp_path / "source" / folder / "00.jpg")
    assert main([str(tmp_path / "source"), "-o", str(tmp_path / "out")]) == 0
    stored = {image for _, image in records(tmp_path / "out", "val")}
    kept = ("progressive.jpg", "gray.jpg", "cmyk.jpg", *(f"magic{shift}.jpg" for shift in range(4)))
    assert [name for name in kept if (odd / name).read_bytes() not in stored] == []
    fn, names = DALI.fn, sorted(path.name for path in odd.iterdir())

    @DALI.pipeline_def(batch_size=len(names), num_threads=1, device_id=None)
    def read():
        files = {"path": [str(tmp_path / "out" / "val.rec")], "index_path": [str(tmp_path / "out" / "val.idx")]}
        jpegs, labels = fn.readers.mxnet(**files)
        return fn.decoders.image(jpegs, output_type=DALI.types.RGB), labels

    pipeline = read()
    pipeline.build()
    for name, decoded in zip(names, pipeline.run()[0]):
        image = Image.open(odd / name)
        if image.mode.startswith("I"):
            image = Image.fromarray((np.asarray(image) // 256).astype("uint8"))
        # Means of 8x8 pixels: JPEG blurs the dither of a palette, and that is no fault.
        expected = np.asarray(image.convert("RGB").reduce(8)).astype(int)
        found = np.asarray(Image.fromarray(np.asarray(decoded)).reduce(8)).astype(int)
        assert abs(found - expected).mean() < 2, name
