"""Several processes behind one port: their sockets, and what they ask each other, so that any can answer for all."""
