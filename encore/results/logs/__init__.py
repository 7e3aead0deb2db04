"""MLPerf logs of every dialect, read and summed up."""
