"""Training code, one framework per implementation. It runs without the ``encore`` package."""
