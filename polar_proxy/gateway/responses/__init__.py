"""Stored responses, background responses and conversations of the Responses API, and its WebSocket."""
