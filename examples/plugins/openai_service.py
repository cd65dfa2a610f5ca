"""Sample from a model that somebody else serves, by OpenAI's completions API (`pip install openai`).

The service must take a prompt of token ids, and return token ids and logprobs, as vLLM's server and whet's endpoint do.
It takes no weights, so it can be evaluated (`whet eval`) but not trained. `model.path` names its config and tokenizer.
"""

import os
from functools import cached_property

import numpy as np
from attrs import frozen

import whet


@frozen
class OpenaiServiceConfig:
    """Samples from a model behind an OpenAI-compatible address. The key is in the variable OPENAI_API_KEY."""

    base_url: str
    """The address, e.g. `http://localhost:8000/v1`."""
    model: str
    """The name of the model at the service."""


def facts(config, model):
    return whet.GeneratorFacts(notes=("openai-service takes no weights: it is for `whet eval`, and for roles",))


class OpenaiService:
    def __init__(self, config, context):
        self._config = config

    @cached_property
    def _client(self):
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self._config.base_url, api_key=os.environ["OPENAI_API_KEY"], max_retries=5)

    async def generate(self, request):
        sampling = request.sampling
        answer = await self._client.completions.create(
            model=self._config.model,
            prompt=request.tokens.tolist(),
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=list(sampling.stop) or None,
            seed=request.seed % 2**63,
            logprobs=0,
            extra_body={"return_token_ids": True},
        )
        (choice,) = answer.choices
        tokens = np.array(choice.token_ids, np.int64)
        logprobs = np.array(choice.logprobs.token_logprobs, np.float32)
        return whet.Completion(request.id, tokens, logprobs, choice.finish_reason, ((0, 0),))

    def receive_weights(self, spec, version, on_weight_update="drain"):
        raise whet.WhetError("a service takes no weights: use this generator for `whet eval`")

    def sleep(self):
        return None

    def wake(self):
        pass

    def close(self):
        pass


@whet.hookimpl
def whet_generators():
    return [whet.Component("openai-service", OpenaiServiceConfig, ":OpenaiService", ":facts")]
