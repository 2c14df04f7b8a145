"""Claims against facts: the probe runs what a backend claims and compares it with the oracle."""
