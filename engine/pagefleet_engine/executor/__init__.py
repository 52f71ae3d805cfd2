"""Runs step plans: where they are computed, behind one interface."""
