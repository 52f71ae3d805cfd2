"""Keeps every computed block in a folder, to be looked at."""
