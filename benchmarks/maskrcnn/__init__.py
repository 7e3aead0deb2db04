"""Mask R-CNN, instance segmentation on COCO."""
