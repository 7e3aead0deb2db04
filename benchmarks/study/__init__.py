"""Measuring programs of studies: ``config.json`` in, one measurement (JSON) out; nothing is trained to a target."""
