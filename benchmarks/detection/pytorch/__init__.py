"""What SSD and Mask R-CNN in PyTorch share."""
