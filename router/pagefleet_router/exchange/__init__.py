"""One request from its arrival to its end."""
