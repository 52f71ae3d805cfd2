"""Turns InferenceServices into running workloads, here and on Kubernetes."""
