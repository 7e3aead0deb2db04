"""Code that the trainings in PyTorch share: optimizers, gradient reduction, CUDA graphs, kernels, files of weights."""
