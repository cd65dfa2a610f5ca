"""An OpenAI-compatible address on this machine, at which foreign agents and people ask the model of a run."""
