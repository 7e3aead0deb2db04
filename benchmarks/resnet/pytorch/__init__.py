"""ResNet in PyTorch with DALI input and DistributedDataParallel."""
