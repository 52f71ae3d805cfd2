"""The protocol of a transfer, without I/O.

`source` and `target` are the two ends as state machines: messages, frames, time and jobs go in, actions come out. They
know no socket, no thread and no clock; whoever drives them calls from one thread (or under one lock) and carries out
the actions in order.
"""
