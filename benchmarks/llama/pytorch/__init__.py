"""The network of Llama in PyTorch, and how it is split over ranks."""
