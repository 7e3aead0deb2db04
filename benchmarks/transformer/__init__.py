"""The Transformer on WMT17 English to German: the task, once for all implementations."""
