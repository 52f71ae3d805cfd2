"""Talking to a model from a terminal: with a server that runs, or with an engine that is started for it."""
