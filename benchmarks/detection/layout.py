"""Files in a prepared data set; standard library only."""

PARTS = ("train", "val")
# The fields of annotations.Part with the same names, and ``bytes`` (int64 (N,)) and ``checksums`` (uint8 (N, 32),
# sha256) of the image files, which are only read by a verification. ``files`` has names in UTF-8, padded with zeros to
# equal length
ARRAYS = (
    "image_ids",
    "files",
    "bytes",
    "checksums",
    "sizes",
    "offsets",
    "boxes",
    "labels",
    "areas",
    "crowds",
    "polygon_offsets",
    "point_offsets",
    "points",
)


def images_folder(part: str) -> str:
    return f"{part}2017"


def json_file(part: str) -> str:
    return f"annotations/instances_{part}2017.json"


# Only the images and boxes of the part
def boxes_file(part: str) -> str:
    return f"annotations/boxes_{part}2017.json"


def array_file(part: str, array: str) -> str:
    return f"{part}_{array}.npy"
