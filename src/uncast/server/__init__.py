"""The OpenAI API over the engine: checked bodies, streams, limits, metrics, profiling, and an orderly end."""
