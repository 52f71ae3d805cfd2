"""K/V that comes from elsewhere and goes there: the connectors, and what they share."""
