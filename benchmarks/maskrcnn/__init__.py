"""Mask R-CNN with ResNet-50 and FPN on COCO 2017: the task, once for all implementations."""
