"""Llama: what the pretraining of Llama 3.1 8B and the fine-tuning of Llama 2 70B have in common."""
