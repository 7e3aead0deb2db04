"""ResNet in MXNet Gluon with DALI input and Horovod."""
