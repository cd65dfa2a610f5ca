"""The side of tools that runs in processes of its own: users' functions, and clients of MCP servers.

Nothing here is imported by the driver. What hangs, crashes or eats memory here ends a process, and no run.
"""
