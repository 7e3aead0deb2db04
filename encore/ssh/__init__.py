"""Runs on multiple hosts over ssh, without a scheduler."""
