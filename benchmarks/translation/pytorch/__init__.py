"""What the translation benchmarks have in common in PyTorch."""
