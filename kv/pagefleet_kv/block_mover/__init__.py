"""Moves blocks between a worker's pages, host memory and a folder, in threads of its own."""
