"""What every DALI pipeline here needs, for any framework."""

from __future__ import annotations

import inspect

from nvidia.dali import Pipeline

# Newer releases default to an executor whose outputs have no stream, so that copying them would block (torch_dali.py).
EXECUTOR = {"exec_dynamic": False} if "exec_dynamic" in inspect.signature(Pipeline.__init__).parameters else {}
