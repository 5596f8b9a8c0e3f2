"""What the ranks of a tensor or sequence axis compute together."""
