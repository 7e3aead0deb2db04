"""State of every training: configuration, ranks, MLPerf log, metrics, stop votes, checkpoints."""
