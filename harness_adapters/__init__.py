"""Harness adapters: how to install and launch agent programs. This package does not import `polar_proxy`."""
