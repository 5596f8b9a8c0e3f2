"""Whole weights one after another: what they are called, in which groups they are gathered, and their stream."""
