"""BERT pretraining: the task, once for all implementations."""
