"""The format of a save: its manifest, its tensors as bytes, and leaves a block at a time."""
