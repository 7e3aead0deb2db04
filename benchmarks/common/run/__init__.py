"""The state that every training keeps: configuration, ranks, MLPerf log, metrics, stop votes, checkpoints."""
