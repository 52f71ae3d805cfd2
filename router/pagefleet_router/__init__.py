"""The HTTP front door: picks an engine for each request and streams its answer."""
