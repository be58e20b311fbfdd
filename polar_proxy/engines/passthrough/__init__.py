"""`passthrough`: calls go to the provider with the agent's own key, and are recorded as text with usage and times.

engine.py   sends a request unchanged, and streams the answer back
answers.py  reads what passes through, for the record
socket.py   the WebSocket to a provider
"""
