"""Models of transformers, by stand-ins of the classes that it has; tests/peers asks transformers itself."""
