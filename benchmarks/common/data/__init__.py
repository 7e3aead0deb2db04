"""Data set preparation: a common command line and life cycle for all benchmarks, standard library only."""
