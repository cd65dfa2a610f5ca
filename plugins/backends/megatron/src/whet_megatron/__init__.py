"""Train with Megatron Core: tensor, sequence, pipeline, context and expert parallelism."""
