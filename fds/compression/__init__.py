"""Compression: quantization grids, pruning masks, and models that become smaller. Mathematics and values alone."""
