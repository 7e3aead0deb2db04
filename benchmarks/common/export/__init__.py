"""Writing a trained model for a server, reading it back, and checking it."""
