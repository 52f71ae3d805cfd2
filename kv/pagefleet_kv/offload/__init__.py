"""Keeps the K/V that the pool gives up: in host memory, then on disk."""
