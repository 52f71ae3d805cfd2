"""The Kubernetes objects that an InferenceService needs, as plain dicts. Pure; one kind or one idea in each file."""
