"""What the main job, `examples/train_gpt.py`, is made of: a model, a text, a log, a display, a curve, a sample."""
