"""ZeRO: who holds which slice, how parameters are gathered and gradients reduced, in buckets."""
