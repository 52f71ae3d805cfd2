"""The asynchronous client of an engine core."""
