"""SSD300 in PyTorch."""
