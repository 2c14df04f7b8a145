"""One config-driven MLA decoder for every family: `ModelConfig` in, logits out."""
