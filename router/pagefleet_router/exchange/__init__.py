"""One request from its arrival to its end.

Endings, here and in `wire`: `finish` when nothing is missing, `cut` with a refusal that the client is told in whichever
way is open, `abandon` an engine's connection and `abort` a client's, so that the other side sees that it is gone,
`close` to let go of all that is held, which tells nobody and may be called again, and `end` what is only counted.
"""
