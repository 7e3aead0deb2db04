"""Slurm: the allocation that a run finds itself in, the srun line for its ranks, submission and requeue."""
