"""Prompts as token ids: the tokenizers of the served models, and the prompts that they have read."""
