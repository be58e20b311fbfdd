"""Harnesses that are described by a TOML file: how to install, connect and start an agent, as data.

The files of `catalogue/` are Polar's own. `polar harness add FILE` copies a user's file into the folder of the
installed harnesses. No task, row or request can name a file: a harness is found by its name only.
"""
