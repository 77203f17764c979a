"""Shared by all attention operators: checked inputs, score forms, the grid of positions, dropout, torch's modes."""
