"""Sets of runs held against what was submitted: verdicts, and what explains a difference."""
