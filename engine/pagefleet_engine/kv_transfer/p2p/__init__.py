"""K/V passed from the engine that computed a prompt to the engine that goes on from it."""
