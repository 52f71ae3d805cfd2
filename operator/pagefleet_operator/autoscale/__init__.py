"""How many engines a service should have: pure decisions from what its routers say. Knows no Kubernetes."""
