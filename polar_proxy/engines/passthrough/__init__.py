"""`passthrough`: the provider answers, with the agent's own key; the call is recorded as text, with usage and time.

engine.py   sends a request unchanged, and streams the answer back
answers.py  reads what passes through, for the record
socket.py   the WebSocket to a provider
"""
