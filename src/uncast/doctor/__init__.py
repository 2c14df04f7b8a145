"""The doctor: reads profiler traces of LLM servers and names the bytes that a decode step moves without need.

Imports no other room and no torch: `rich` and `msgspec` are all it needs.
"""
