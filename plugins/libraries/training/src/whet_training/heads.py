"""What a backend says of its models: the outputs of a head, and the teacher beside the policy."""

from whet.data.model_info import ModelInfo, locate, read_model
from whet.errors import ConfigError


def outputs_of(head: str, teacher: str) -> frozenset[str]:
    """Return the names of the outputs of a model with the head `lm` or `value`. `teacher`: a second model, if any."""
    if head == "value":
        return frozenset({"values"})
    divergences = {"kl_forward", "kl_reverse", "jensen_shannon"} if teacher else set()
    return frozenset({"logprobs", "entropy", "logprobs_at", "topk_ids", "topk_logprobs", *divergences})


def read_teacher(teacher: str, policy: ModelInfo) -> ModelInfo:
    """Return the facts of a teacher. Raises `ConfigError` if its vocabulary is of another size than the policy's."""
    info = read_model(locate(teacher), policy.dtype, policy.trust_remote_code)
    if info.vocab_size != policy.vocab_size:
        sizes = f"{info.vocab_size} tokens, the model that is trained {policy.vocab_size}"
        raise ConfigError(f"backend.teacher: {info.path} has a vocabulary of {sizes}; they must share one")
    return info
