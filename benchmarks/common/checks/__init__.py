"""Measurements and correctness checks of a training step on this machine: bench, selftest, roofline, kernels."""
