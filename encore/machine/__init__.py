"""This machine: hardware, topology, network, processes, and checks before a run."""
