"""What is wrong with a megatron section by itself, beyond the bounds of its fields. Imports no torch."""

from collections.abc import Iterator

from whet.component import Problem
from whet_megatron import fp8
from whet_megatron.config import MegatronConfig
from whet_training import schedule, weight_groups


def problems(config: MegatronConfig, path: str, gpus: int, dtype: str, where: str = "model.dtype") -> Iterator[Problem]:
    """Yield the problems of a section that stands at `path`, of a role with so many GPUs, whose model is in `dtype`.

    `where`: the key of that dtype.
    """
    role = path.removeprefix("roles.")
    if not gpus and (key := "fp8" if config.fp8 else "layers" if config.layers == "transformer-engine" else ""):
        words = f"is set, and cluster.gpus gives {role} none; Transformer Engine needs GPUs: set cluster.gpus.{role}"
        yield Problem(f"{path}.{key}", f"{words}, or leave it out")
    special = config.layout == "packed" or config.parallel.context > 1
    if gpus and config.layers != "test" and dtype == "float32" and special:
        words = "is float32, in which Transformer Engine has no attention for packed rows or context parallelism"
        yield Problem(where, f"{words}; set {where}: bfloat16")
    yield from schedule.problems(config.schedule, f"{path}.schedule")
    yield from weight_groups.problems(config.optimizer.groups, f"{path}.optimizer.groups")
    if config.optimizer.overlap and config.parallel.virtual > 1:
        words = "is true, and parallel.virtual is above 1; with virtual stages gradients are added up at the end"
        yield Problem(f"{path}.optimizer.overlap", words)
    if config.load and config.lora is not None:
        words = "is set, and an adapter is checked against the weights in model.path: import the checkpoint first"
        yield Problem(f"{path}.load", f"{words} (`whet import`), and give the new folder as model.path")
    if config.fp8:
        yield from fp8.section_problems(config.fp8, config.layers, f"{path}.fp8")
    if config.experts.balance_of == "model" and config.experts.balance_over == "micro-batch":
        words = (
            "is model, and balance_over is micro-batch; a stage does not know the load of the layers of other stages"
        )
        yield Problem(f"{path}.experts.balance_of", f"{words} before the pass ends: take balance_over: batch, or layer")
