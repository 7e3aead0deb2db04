"""GNMT v2 on WMT16 English to German: the task, once for all implementations."""
