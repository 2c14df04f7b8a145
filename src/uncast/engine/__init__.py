"""From tokens to text: the model runner over the paged pool, sampling, stopping, streaming."""
