"""This machine: its node, topology, network, processes, and what is checked before a run."""
