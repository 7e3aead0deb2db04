"""ResNet in TensorFlow with DALI input and Horovod."""
