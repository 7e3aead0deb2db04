"""Train BERT, and ask rank 1 to stop at a certain micro-batch: NUMBER CONFIG DATA OUTPUT."""

import signal
import sys

from benchmarks.bert.pytorch import train
from benchmarks.common.run.stopping import end_process

WANTED, CONFIG, DATA, OUTPUT = sys.argv[1:]
counted, plain = [0], train.micro_step


def micro_step(training, part, *last):
    counted[0] += 1
    if counted[0] == int(WANTED) and training.ranks.rank == 1:
        signal.raise_signal(signal.SIGTERM)
    return plain(training, part, *last)


train.micro_step = micro_step
end_process(lambda: train.main(["--config", CONFIG, "--data", DATA, "--output", OUTPUT]))
