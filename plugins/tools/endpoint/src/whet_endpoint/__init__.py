"""OpenAI-compatible endpoints: external agents and people ask the model of a whet run over HTTP."""
