"""Turn one source image into the JPEG bytes that a record holds; the original bytes are kept where they can be."""

from __future__ import annotations

import io
import warnings
from typing import NamedTuple, Optional

from PIL import Image, UnidentifiedImageError

# A photograph of 200 megapixels is no attack here, and an odd EXIF block no reason to worry.
Image.MAX_IMAGE_PIXELS = None
warnings.filterwarnings("ignore", module=r"PIL\.")

DEFAULT_QUALITY = 95  # JPEG quality (1 to 100) of what has to be re-encoded, im2rec's default

# Baseline, extended and progressive Huffman frames are what libjpeg-turbo, nvJPEG and the hardware
# decoder share; lossless, hierarchical and arithmetic-coded ones are re-encoded.
_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)
_FRAMES = tuple(code for code in range(0xC0, 0xD0) if code not in (0xC4, 0xC8, 0xCC))
_WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))


class CorruptImage(ValueError):
    """An image that cannot be decoded; says why."""


class Encoding(NamedTuple):
    """Options of the encoding."""

    # Pixels of the short side; larger images are reduced to it, smaller ones are left alone.
    resize: Optional[int] = None
    # JPEG quality, 1 to 100; None keeps the original bytes of JPEGs that need no resizing.
    quality: Optional[int] = None
    trust: bool = False  # whether JPEGs whose bytes are kept are not decoded to see that they can be


def encode(data: bytes, encoding: Encoding) -> bytes:
    """JPEG bytes of an image file of any format that Pillow reads.

    A plain JPEG keeps its bytes, CMYK ones too, as the published packings of ImageNet do; DALI decodes
    them. The EXIF orientation is not applied, and DALI 1.35 does not apply it to kept bytes either.

    Raises:
        CorruptImage: the bytes are no image, or one that ends early.
    """
    kept = is_plain_jpeg(data)
    if kept and encoding.trust and encoding.resize is None and encoding.quality is None:
        return data
    try:
        with Image.open(io.BytesIO(data)) as image:
            shrinks = encoding.resize is not None and min(image.size) > encoding.resize
            if kept and encoding.quality is None and not shrinks:
                # At one eighth of the size the decoder still walks through every coded bit.
                image.draft(None, (1, 1))
                image.load()
                return data
            return _save(image, encoding.resize if shrinks else None, encoding.quality or DEFAULT_QUALITY)
    except UnidentifiedImageError:
        # Pillow's own text names the buffer in memory, and whoever reads this names the file.
        raise CorruptImage("no image of a format that Pillow reads") from None
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError) as error:
        # What Pillow's many decoders raise on bytes that break their format.
        raise CorruptImage(str(error) or type(error).__name__) from None


def _save(image: Image.Image, short_side: Optional[int], quality: int) -> bytes:
    rgb = to_rgb(image)
    if short_side is not None:
        scale = short_side / min(rgb.size)
        rgb = rgb.resize([max(1, round(side * scale)) for side in rgb.size], Image.BICUBIC)
    buffer = io.BytesIO()
    rgb.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def to_rgb(image: Image.Image) -> Image.Image:
    """The first frame in 8-bit RGB; 16-bit gray is scaled, where Pillow's own conversion would clip it."""
    if image.mode.startswith("I;16"):
        image = image.convert("I")
    if image.mode == "I":
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    return image.convert("RGB")


def is_plain_jpeg(data: bytes) -> bool:
    """Whether every decoder takes these bytes: 8 bits, Huffman-coded, sequential or progressive."""
    if data[:2] != b"\xff\xd8":
        return False
    position = 2
    while position + 9 < len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker in _FRAMES:
            return marker in _PLAIN_FRAMES and data[position + 4] == 8
        if marker == 0xFF or marker in _WITHOUT_LENGTH:
            position += 1 if marker == 0xFF else 2
        else:
            position += 2 + int.from_bytes(data[position + 2 : position + 4], "big")
    return False
