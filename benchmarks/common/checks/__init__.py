"""What measures or proves a training step on this machine: bench, selftest, roofline, kernels."""
