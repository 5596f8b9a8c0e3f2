"""Cross-entropy, of logits and of a linear head that never holds all of them."""
