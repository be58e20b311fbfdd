"""Harnesses as data: a TOML file describes how to install, connect and start one agent.

The files of `catalogue/` are Polar's own. `polar harness add FILE` copies a user's file into the folder of the
installed harnesses. No task, row or request can name a file: a harness is found by its name only.
"""
