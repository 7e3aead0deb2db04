"""GNMT v2, translation by LSTMs with attention: the task of MLPerf Training v0.5 to v0.7, once for all frameworks."""
