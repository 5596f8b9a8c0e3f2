"""Tests of the room `compression`."""
