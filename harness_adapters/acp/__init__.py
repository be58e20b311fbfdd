"""Agents that speak the Agent Client Protocol (https://agentclientprotocol.com), driven for any number of user turns."""
