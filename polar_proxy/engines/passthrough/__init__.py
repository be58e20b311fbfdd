"""`passthrough`: the provider answers, with the agent's own key; the call is recorded as text, with usage and time.

engine.py   sends a request as it came, and returns the answer as it comes
answers.py  reads what passes through, for the record
socket.py   the WebSocket to a provider
"""
