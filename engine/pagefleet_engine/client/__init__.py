"""The asynchronous side of the engine: what the server uses."""
