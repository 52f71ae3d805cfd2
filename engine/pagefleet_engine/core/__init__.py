"""Requests, blocks and the scheduler. Knows no torch, so its tests take milliseconds."""
