"""BERT pretraining in PyTorch: rows of tokens without padding, the vocabulary at masked places alone, LAMB."""
