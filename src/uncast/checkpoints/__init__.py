"""Checkpoints on disk to models in memory."""
