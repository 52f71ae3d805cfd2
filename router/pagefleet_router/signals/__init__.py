"""What engines say of themselves: readiness and load."""
