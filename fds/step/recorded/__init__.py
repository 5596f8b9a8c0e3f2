"""Steps whose work is recorded once for every kind of batch, and replayed: as CUDA graphs, or as one compiled graph."""
