"""From conversations and text to token ids and back. A model's tokenizer and template are data here, never code."""
