"""MLPerf submissions: write and check packages, and reproduce published configurations."""
