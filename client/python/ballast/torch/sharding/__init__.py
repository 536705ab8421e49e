"""Models whose parameters live on the state servers: shard() and what works behind it."""
