"""Minigo in TensorFlow with Horovod."""
