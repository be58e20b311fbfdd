"""Agents that speak the Agent Client Protocol (https://agentclientprotocol.com), for any number of user turns."""
