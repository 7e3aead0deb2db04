"""Encore reproduces MLPerf Training results: configure, run, evaluate, compare.

This is the host side. It does not import deep learning frameworks; the training code in ``benchmarks/`` does not
import this package.
"""

__version__ = "1.0.0"
