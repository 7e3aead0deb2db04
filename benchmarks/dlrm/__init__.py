"""DLRM on Criteo's click logs: the task, once for all implementations."""
