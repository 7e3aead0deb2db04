"""Mask R-CNN in PyTorch."""
