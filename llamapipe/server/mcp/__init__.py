"""MCP servers: child processes or addresses, or those of another process of this server.

``requests.mcp_tools`` offers their tools to the model and runs its calls.
"""
