"""The plan of one InferenceService as Kubernetes objects, plain dicts. Pure; one kind or one idea in each file."""
