"""Environments with tools: a calculator for a first run, and `tools`, with functions, search, Python and MCP."""
