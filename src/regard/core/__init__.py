"""What every attention operator shares: checked inputs, score forms, the grid of positions, dropout, torch's modes."""
