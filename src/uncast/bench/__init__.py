"""Measurements: every figure in README comes from a command of this room, recorded as CSV with versions."""
