"""Parts of the main job, `examples/train_gpt.py`: model, text, log, display, curve, sample."""
