"""Polar: a flight recorder for coding agents (see docs/architecture.md)."""

__version__ = "0.1.0"
