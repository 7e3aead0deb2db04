"""Transformer in PyTorch: attention by fused operators, a loss without logits, decoding with a cache."""
