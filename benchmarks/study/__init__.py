"""Measurement programs of studies: one ``config.json`` in, one measurement (JSON) out; no training to a target."""
