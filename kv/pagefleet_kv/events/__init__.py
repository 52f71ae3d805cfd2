"""Tells routers what the prefix cache gains and loses: `pagefleet_protocol.kv_events` over ZMQ, by a thread."""
