"""The limit of a completion's length, and requests that no engine can serve."""

from whet.data.records import Request
from whet.errors import WhetError


def context_length(own: int, asked: int, most: int) -> int:
    """Return the limit of a sequence's length in tokens; 0: the engine decides. An argument of 0 is unknown.

    own: the generator's setting; asked: the longest sequence of the run; most: what the model was made for.
    """
    return min((limit for limit in (own, asked, most) if limit), default=0)


def completion_limit(
    request: Request, max_length: int, vocab_size: int, engine: str, lowest_temperature: float = 0.0,
    schemas: bool = False, strings: bool = True,
) -> int:  # fmt: skip
    """Return how many tokens the completion may have. Raises `WhetError` for a request that cannot be served.

    max_length: limit of prompt and completion; lowest_temperature: the lowest that the engine supports, apart from 0;
    schemas: whether the engine can hold a text to a JSON schema; strings: whether it can find stop strings.
    """
    length, sampling = len(request.tokens), request.sampling
    if length == 0:
        raise WhetError(f"request {request.id} has an empty prompt; there is nothing to continue")
    if sampling.schema and not schemas:
        raise WhetError(f"request {request.id} has a JSON schema, and {engine} cannot hold a text to it here")
    if sampling.stop and not strings:
        raise WhetError(
            f"request {request.id} has stop strings, which {engine} cannot find without a tokenizer in the model "
            "folder; add its files, or use stop tokens"
        )
    if not 0 <= int(request.tokens.min()) <= int(request.tokens.max()) < vocab_size:
        raise WhetError(f"request {request.id} has a token outside the vocabulary of {vocab_size}")
    if length >= max_length:
        raise WhetError(
            f"request {request.id} has a prompt of {length} tokens, which leaves no room in the engine's {max_length}; "
            "raise generator.max_context, or shorten the prompt"
        )
    if 0 < sampling.temperature < lowest_temperature:
        raise WhetError(
            f"request {request.id} asks for temperature {sampling.temperature:g}; {engine}'s lowest but 0 is "
            f"{lowest_temperature:g}"
        )
    return min(sampling.max_tokens, max_length - length)
