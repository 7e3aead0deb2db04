"""Logs against the rules of their round, and against its reference convergence."""
