"""The MLPerf log events of gpt-oss-20b: those of Llama 3.1 8B under its own name.

The rules differ in the target alone (mlperf-logging 4.1.68, training_6.0.0 and 6.1.0, closed_gpt_oss_20b.yaml).
"""

from mlperf_logging.mllog import constants

from benchmarks.common.run.mllog import Wording
from benchmarks.llama31_8b.events import hyperparameters, timeline

__all__ = ["WORDING", "hyperparameters", "timeline"]

WORDING = Wording("gpt_oss_20b", accuracy_first=True, evaluated_at=constants.SAMPLES_COUNT)
