"""Renderers, one for each runtime: pure functions from a job to the command that this machine executes."""
