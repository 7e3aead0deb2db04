"""Archive bombs: small files with 1 GiB of content."""

import gzip
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

GIB = 1 << 30
PIECES = 64
CPU_SECONDS = 20.0  # Reading all of it takes minutes; 1.5 on an idle core, more on shared ones


def compressed(piece: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    # Return 1 GiB of ``piece`` as a gzip file of many members
    member = gzip.compress(piece * (GIB // PIECES // len(piece)), mtime=0)
    return gzip.compress(before, mtime=0) + member * PIECES + gzip.compress(after, mtime=0)


def write(path: Path, name: str, piece: bytes, kind: bytes = tarfile.REGTYPE) -> Path:
    # Write an archive with 1 GiB of ``piece`` in the member ``name``; a ZIP file has 128 MiB
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, piece * (GIB // 8 // len(piece)))
        return path
    member = tarfile.TarInfo(name)
    member.size, member.type = GIB, kind
    path.write_bytes(compressed(piece, member.tobuf(), bytes(1024)))
    return path


@contextmanager
def is_fast() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < CPU_SECONDS
