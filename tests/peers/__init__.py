"""What only a venv with the extra `peers` can ask: fds beside the installed DeepSpeed."""
