"""Shared parts of the adapters: installers with a cache, and writers of config files."""
