"""The paged-attention engine: scheduler, KV cache, models, OpenAI server, offline LLM."""
