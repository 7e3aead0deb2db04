"""Studies: questions, the grid of measurements that answers them, and what was published of it."""
