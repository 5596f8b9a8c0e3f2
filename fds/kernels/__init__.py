"""Kernels: Triton where the time goes, each beside a reference in plain torch. One kernel, one file."""
