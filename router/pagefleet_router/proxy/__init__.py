"""The data path: asyncio protocols on both sides, no task per request, no byte of a stream encoded twice."""
