"""Training step measurements and correctness checks on this machine: bench, selftest, roofline, kernels."""
