"""Look for what a genuine set of result logs does not have: late starts, copies, impossible clocks, edited outliers."""
