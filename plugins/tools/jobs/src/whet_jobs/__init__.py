"""The shorter jobs beside a run: `whet eval` evaluates a model, `whet export` writes a checkpoint as a model folder."""
