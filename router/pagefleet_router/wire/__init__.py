"""Bytes between clients, this router and engines: connections, parsers, pools, and what a head may say."""
