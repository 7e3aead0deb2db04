"""Runs over many hosts that ssh reaches, without a scheduler."""
