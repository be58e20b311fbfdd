"""Requests that a provider answers: passed through as they are, or intercepted on their way to its host."""
