"""KV events of engines: subscribed to, checked for gaps, and brought into the exact prefix index."""
