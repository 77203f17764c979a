"""Tiles of the query-key pairs that a mask leaves: runs, bits, spans, diagonals and selections, for all backends."""
