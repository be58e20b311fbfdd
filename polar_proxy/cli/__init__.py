"""The `polar` command: one file per family of verbs."""

from polar_proxy.cli.app import main

__all__ = ["main"]
