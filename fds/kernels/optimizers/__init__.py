"""Updates of flat slices by AdamW, LAMB, Lion and SGD, in one pass over memory (LAMB in two)."""
