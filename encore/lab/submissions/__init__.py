"""Submissions: MLPerf's package of results, written and checked, and a published configuration run here."""
