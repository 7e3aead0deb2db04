"""Functions of the lab that core commands call, by option.

Core commands import neither encore.lab nor a lab command: they load a function of this table when its option is given.
"""

import importlib
from typing import Any

EXTENSIONS = {
    "bench --project": "encore.lab.scaling.projection:open_system",
    "bench --roofline": "encore.cli.study:report_roofline",
    "check --package": "encore.lab.submissions.archive:check_trees",
    "list --studies": "encore.cli.study:list_studies",
    "report --package": "encore.lab.submissions.archive:check_trees",
    "report --study": "encore.lab.scaling.printed_tables:tables_and_findings",
}


def load(option: str) -> Any:
    module, _, function = EXTENSIONS[option].partition(":")
    return getattr(importlib.import_module(module), function)
