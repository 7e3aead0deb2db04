"""Reading, scoring and checking result logs, and comparing them with what was submitted."""
