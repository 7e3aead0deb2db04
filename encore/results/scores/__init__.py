"""Scores of sets of runs by the rules of their round."""
