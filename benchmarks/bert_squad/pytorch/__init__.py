"""BERT on SQuAD in PyTorch."""
