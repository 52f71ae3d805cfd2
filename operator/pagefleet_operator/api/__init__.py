"""How the API server gets to know our resources: CustomResourceDefinitions, generated from the types in `protocol`."""
