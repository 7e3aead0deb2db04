"""SSD300 with ResNet-34 on COCO 2017: the task, once for all implementations."""
