"""`passthrough`: calls go to the provider with the agent's own key, and are recorded as text with usage and times.

engine.py   sends a request unchanged, and streams the answer back
answers.py  reads the answer on its way to the agent, so that it can be recorded
socket.py   connects an agent's WebSocket to its provider
"""
