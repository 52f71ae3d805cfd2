"""What the router knows of its engines: which there are, what they have to do, how fast they are."""
