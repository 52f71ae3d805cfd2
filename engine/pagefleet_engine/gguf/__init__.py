"""Models in GGUF: weights in blocks, and configuration, tokenizer and template in the same file."""
