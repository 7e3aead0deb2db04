"""Breaks runs in every way that a machine and its user can, and checks what is left: see ``__main__``."""
