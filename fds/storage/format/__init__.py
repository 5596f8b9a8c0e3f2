"""The format of a save: its manifest, tensors as bytes, and leaves in blocks."""
