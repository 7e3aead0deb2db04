"""What a Python of the user's may answer."""

from pathlib import Path
from typing import Any

from encore.containers.runtimes import Target
from encore.machine.pythons import Facts

# By which the toy data set of resnet is made
PACKAGES = dict.fromkeys(("joblib", "mlperf_logging", "pillow", "scikit-learn", "scipy", "threadpoolctl"), "1")


def answered(**changes: Any) -> Target:
    known = {"python": "3.11.7", "problems": {}, "packages": {}, "cuda": "12.4", "gpus": 8}
    facts = Facts(**{**known, "mpirun": False, "horovod": 0, "check_build": "", **changes})
    return Target(python=Path("/apps/bin/python"), facts=facts)
