"""What the browser console shows: put together at most once a second, however many pages ask."""
