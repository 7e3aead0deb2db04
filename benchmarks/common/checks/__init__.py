"""Measurements and proofs of a training step on this machine: bench, selftest, roofline, kernels."""
