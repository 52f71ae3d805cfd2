"""Linear layers whose matrix is stored in eight bits: which scheme a layer has, its slots, and how it is multiplied."""
