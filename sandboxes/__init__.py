"""Sandboxes, in which an agent's programs run.

`base` has the contract, `choice` opens a sandbox of a kind that works on this machine, `orphans` removes the sandboxes
of dead owners. The kinds are `docker`, `bubblewrap` and `process`.
"""
