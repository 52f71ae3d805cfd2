"""Linear, norm, rotary and embedding layers shared by all models."""
