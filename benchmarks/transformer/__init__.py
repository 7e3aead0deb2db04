"""Transformer on WMT English to German: the task, once for all implementations."""
