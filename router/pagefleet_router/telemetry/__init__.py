"""What the router tells of itself: metrics, logs."""
