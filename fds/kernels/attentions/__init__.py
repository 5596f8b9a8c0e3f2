"""Attention, its softmax by itself, and the rotary embedding of its queries and keys."""
