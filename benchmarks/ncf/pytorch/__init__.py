"""NCF in PyTorch: sampling, training and evaluation on the device, torch.distributed across."""
