"""Planning: which kernel computes a problem, and why; prices of work."""
