"""Scaling studies: sweeps over numbers of GPUs, a cost model, and how to share a machine."""
