"""What was published: scores, systems and their descriptions."""
