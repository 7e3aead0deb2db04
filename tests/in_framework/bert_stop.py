"""Train BERT and send SIGTERM to rank 1 in a micro-batch: NUMBER CONFIG DATA OUTPUT."""

import itertools
import signal
import sys

from benchmarks.bert.pytorch import train
from benchmarks.common.run.stopping import end_process

NUMBER, CONFIG, DATA, OUTPUT = sys.argv[1:]
numbers, plain_step = itertools.count(1), train.micro_step


def micro_step(training, part, *last):
    if next(numbers) == int(NUMBER) and training.ranks.rank == 1:
        signal.raise_signal(signal.SIGTERM)
    return plain_step(training, part, *last)


train.micro_step = micro_step
end_process(lambda: train.main(["--config", CONFIG, "--data", DATA, "--output", OUTPUT]))
