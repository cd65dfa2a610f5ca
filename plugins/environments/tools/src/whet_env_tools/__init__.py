"""Environments with tools: a calculator for a first run, and `tool-use`, with functions, search, Python and MCP."""
