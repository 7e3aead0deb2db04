"""What the translation benchmarks have in common."""
