"""What SSD and Mask R-CNN share: COCO's data, evaluation, boxes and non-maximum suppression."""
