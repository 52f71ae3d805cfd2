"""Frames over framed sockets, which work everywhere: one connection for each pair of engines."""
