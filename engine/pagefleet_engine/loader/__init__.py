"""Fills a model from safetensors, tensor by tensor."""
