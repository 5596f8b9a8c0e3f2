"""Updates of flat slices: AdamW, LAMB, Lion and SGD, each in one pass over memory."""
