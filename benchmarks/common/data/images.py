"""Decoding of image files by Pillow: 8-bit RGB from any pixel type, and one error for every way to fail."""

import io
import struct
import warnings
import zlib
from contextlib import contextmanager
from typing import Iterator

from PIL import Image, UnidentifiedImageError

# Photographs of 200 megapixels are valid, and malformed EXIF blocks are harmless.
Image.MAX_IMAGE_PIXELS = None
MAX_PIXELS = 1 << 29  # 1.5 GiB as RGB; a PNG of this size may have only half a megabyte
warnings.filterwarnings("ignore", module=r"PIL\.")

BITS_PER_SAMPLE, PHOTOMETRIC, BLACK_IS_ZERO = 258, 262, 1  # TIFF tags (TIFF 6.0, section 3)
SAMPLE_FORMAT, UNSIGNED = 339, 1  # TIFF 6.0, section 19
CONVERT = "convert it to 8 bits per channel, for example: magick IN -auto-level -depth 8 OUT.png"


class CorruptImage(ValueError):
    """An image that cannot be decoded, or whose pixels lack a defined range."""


@contextmanager
def opened(data: bytes) -> Iterator[Image.Image]:
    """Open an image file.

    Raises:
        CorruptImage: opening or decoding it fails, or it is too large.
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise CorruptImage(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            yield image
    except CorruptImage:
        raise
    except UnidentifiedImageError:
        # Pillow's message contains the address of the buffer.
        raise CorruptImage("not an image format that Pillow reads") from None
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        LookupError,
        TypeError,
        AttributeError,
        ArithmeticError,
        struct.error,
        zlib.error,
    ) as error:
        # Pillow's decoders raise all of these for malformed files.
        raise CorruptImage(str(error) or type(error).__name__) from None


def check_pixels(image: Image.Image) -> bool:
    """Return whether the pixels are 16-bit gray.

    Raises:
        CorruptImage: floats, or integers that are signed or have an unknown range, which Pillow would clip.
    """
    tags = getattr(image, "tag_v2", {})
    if image.mode not in ("F", "I") and not image.mode.startswith("I;16"):
        if set(tags.get(SAMPLE_FORMAT, ())) - {UNSIGNED}:
            raise CorruptImage(f"{image.format} with signed pixels, which Pillow reads as unsigned: {CONVERT}")
        return False
    # Only formats for which Pillow and DALI use the same range; a TIFF may have 12 bits or inverted values.
    is_full_tiff = tags.get(BITS_PER_SAMPLE) == (16,) and tags.get(PHOTOMETRIC) == BLACK_IS_ZERO and image.mode != "I"
    if image.mode != "F" and (image.format in ("PNG", "JPEG2000") or is_full_tiff):
        return True
    kind = "float pixels" if image.mode == "F" else "integer pixels of more than 8 bits"
    raise CorruptImage(f"{image.format} with {kind} (mode {image.mode}): {CONVERT}")


def to_rgb(image: Image.Image) -> Image.Image:
    """Return the first frame as 8-bit RGB: 16-bit gray is scaled, an alpha channel is dropped.

    Raises:
        CorruptImage: see ``check_pixels``.
    """
    if check_pixels(image):
        # In two steps: I;16 does not scale, and convert("RGB") clips.
        image = image.convert("I").point(lambda value: value * (1 / 257) + 0.5).convert("L")
    return image.convert("RGB")
