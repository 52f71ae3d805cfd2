"""K/V from one engine to another: `transfer` decides, `planes` carry, and the connector is over both.

A thread of its own (`agent`) drives all of it, so that an engine's steps wait for no peer.
"""
