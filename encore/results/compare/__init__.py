"""Sets of runs compared with what was submitted: verdicts, and what explains a difference."""
