"""One small adapter per way to compute; imported by name through `uncast.attention.registry`."""
