"""Slurm: the allocation that a run finds itself in, the srun line of its ranks, submission and requeue."""
