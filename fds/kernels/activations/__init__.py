"""Activations with what stands beside them: biases, gates, dropout and the residual addition."""
