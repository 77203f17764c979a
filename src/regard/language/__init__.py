"""Training of language models on long texts, whose sequences may be sharded over processes by a ring."""
