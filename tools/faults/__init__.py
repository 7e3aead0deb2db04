"""Fault injection for runs: see ``__main__``."""
