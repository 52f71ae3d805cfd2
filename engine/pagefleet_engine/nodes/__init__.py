"""Ranks on other machines: how their leader reaches them, and what runs there."""
