"""The encoder of BERT in PyTorch, without work on padding, and the files that weights are published in."""
