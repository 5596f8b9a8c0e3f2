"""Transforms, `Step -> Step`: one file, one transform. Import them from `fds`."""
