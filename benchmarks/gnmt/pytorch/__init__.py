"""GNMT v2 in PyTorch."""
