"""Encore reproduces MLPerf Training results: configure, run, judge, compare.

This is the host side. It never imports a deep learning framework; the training code lives in
``benchmarks/`` and never imports this package.
"""

__version__ = "1.0.0"
