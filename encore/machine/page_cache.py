"""Drop the operating system's page cache before a run, as MLPerf asks (training rules, "caches")."""

from __future__ import annotations

import os
from pathlib import Path

DROP = Path("/proc/sys/vm/drop_caches")


def drop() -> bool:
    """Flush and drop page cache, dentries and inodes; False where this user may not."""
    try:
        os.sync()
        DROP.write_text("3\n", encoding="ascii")
    except OSError:
        return False
    return True
