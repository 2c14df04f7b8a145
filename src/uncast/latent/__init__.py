"""The latent cache: row layouts in bytes, their codec, the paged pool."""
