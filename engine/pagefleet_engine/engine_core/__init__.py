"""The step loop in its own process, and the messages that reach it."""
