"""Preparing data sets: one command line and one life of a preparation for all benchmarks, standard library only."""
