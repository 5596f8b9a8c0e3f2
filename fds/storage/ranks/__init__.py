"""What the ranks that keep one state do together: who holds what of it, who writes what, what all agree on."""
