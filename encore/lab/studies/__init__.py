"""Studies: questions, measurement grids, and published figures."""
