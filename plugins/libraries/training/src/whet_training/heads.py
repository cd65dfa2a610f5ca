"""What a backend says of its models: the outputs of a head, and the teacher beside the policy."""

from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from whet.component import Problem
from whet.data.model_info import ModelInfo, locate, read_model
from whet.errors import ConfigError

KEY: Final = "backend.teacher"


def outputs_of(head: str, teacher: str) -> frozenset[str]:
    """Return the names of the outputs of a model with the head `lm` or `value`. `teacher`: a second model, if any."""
    if head == "value":
        return frozenset({"values"})
    divergences = {"kl_forward", "kl_reverse", "jensen_shannon"} if teacher else set()
    return frozenset({"logprobs", "entropy", "logprobs_at", "topk_ids", "topk_logprobs", *divergences})


def read_teacher(teacher: str, policy: ModelInfo, *, config_only: bool = False) -> ModelInfo:
    """Return the facts of a teacher. Raises `ConfigError` if there is none, or it does not share the vocabulary."""
    try:
        folder = _planned(teacher) if config_only else locate(teacher)
        info = read_model(folder, policy.dtype, policy.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(f"{KEY}: {str(error).removeprefix('model.path: ')}") from error
    if info.vocab_size != policy.vocab_size:
        sizes = f"{info.vocab_size} tokens, the model that is trained {policy.vocab_size}"
        raise ConfigError(f"{KEY}: {info.path} has a vocabulary of {sizes}; they must share one")
    return info


@cache
def _planned(teacher: str) -> Path:
    """Return the folder of a model without its weights. A plan asks several times, and the hub answers slowly."""
    return locate(teacher, config_only=True)


def known_teacher(teacher: str, policy: ModelInfo) -> ModelInfo | None:
    """Return the facts of a teacher for planning. None: there is none, or `teacher_problems` refuses it."""
    with suppress(ConfigError):
        return read_teacher(teacher, policy, config_only=True) if teacher else None
    return None


def head_problems(head: str, model: ModelInfo) -> Iterator[Problem]:
    """Yield why a model has no head over tokens, if one is wanted. Paths are within the backend's section."""
    if head == "lm" and model.architecture.endswith("ForSequenceClassification"):
        words = f"is lm, and the model in {model.path} is a {model.architecture}, which scores texts and writes none"
        yield Problem("head", f"{words}; choose a language model, or set it to value")


def teacher_problems(teacher: str, policy: ModelInfo) -> Iterator[Problem]:
    """Yield why a model cannot be a teacher, if one is named. Paths are within the backend's section."""
    try:
        if teacher:
            read_teacher(teacher, policy, config_only=True)
    except ConfigError as error:
        yield Problem("teacher", str(error).removeprefix(f"{KEY}: "))
