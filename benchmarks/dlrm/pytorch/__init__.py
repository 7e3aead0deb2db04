"""DLRM in PyTorch: tables split over the ranks, MLPs on all ranks."""
