"""Code shared by SSD and Mask R-CNN in PyTorch."""
