"""A check after a weight sync: do the logprobs of a few tokens, from each generator replica, match the trainer's?

    driver       draws prompts of random tokens from the run's seed and the version
    replica 0    continues them       replica 1    continues them       ...
    trainer      scores the completions, with the weights that it has just sent
    driver       mean |difference| of each replica <= bound, or the run ends

Manifest and version prove that the weights arrived complete. This check proves that the engine computes with them, and
not with the previous weights, an old packed copy, or another model.

A new adapter changes no logprob, because its matrix B is zero, and the first steps change little. So if an adapter is
trained, the first weight sync sends a random adapter that changes every layer. Then the engine's logprobs must agree
with the trainer's logprobs with this adapter, and not with those of the base.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import define, evolve, field, frozen

from whet.data import randomness
from whet.data.batch import Batch, from_sequences
from whet.data.metrics import Metric, largest
from whet.data.records import Completion, FloatArray, IntArray, Request, Sampling
from whet.errors import RequestLost, WeightSyncError

if TYPE_CHECKING:
    from whet.config.sections import ProbeSection
    from whet.interfaces.backend import Weights
    from whet.interfaces.generator import Generator

BOUNDS: Final = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.1}
"""Largest mean absolute difference by dtype, in nats at temperature 1; see docs/reference/numerics.md."""
LOOSEST: Final = 0.3
"""The bound for any other dtype, such as weights in 8 bits."""
PROMPT_TOKENS: Final = 16
ALWAYS: Final = 2
"""Number of weight syncs after a start or resume that are always checked. The first alone is not enough: an engine that
receives nothing passes it, because it has loaded the same weights itself."""

TRIAL_SHARE: Final = 0.2
"""After a sync of trial weights, the largest mean difference from the trainer's logprobs, as a share of the mean
difference from those of the base."""

Scored = Mapping[tuple[int, tuple[int, ...]], FloatArray]
"""(number of the prompt, tokens of a completion) -> the trainer's logprobs of these tokens."""


def bound_of(*dtypes: str) -> float:
    """Return the bound for parts that compute in these dtypes: the largest of the bounds of the dtypes."""
    return max(BOUNDS.get(dtype, LOOSEST) for dtype in dtypes)


@frozen(eq=False)
class Proof:
    """The evidence that a replica has the weights of a version."""

    version: int
    prompts: tuple[IntArray, ...]
    sampling: Sampling
    seeds: tuple[int, ...]
    """Seed of each prompt. Replicas with the same weights produce the same completion."""
    bound: float
    dtypes: str
    """The dtypes as text, for errors."""
    scored: Scored = field(factory=dict)

    def requests(self, replica: int) -> list[Request]:
        """Return the requests for a replica."""
        return [
            Request(f"probe-{self.version}-{replica}-{i}", prompt, self.sampling, seed, replica=replica)
            for i, (prompt, seed) in enumerate(zip(self.prompts, self.seeds, strict=True))
        ]

    def check(self, replica: int, completions: Sequence[Completion]) -> float:
        """Return the mean absolute difference of a replica's logprobs from the trainer's, in nats.

        A completion that the trainer has not scored is compared up to the first token in which it differs from the
        scored ones. Raises `WeightSyncError` if the mean is above the bound or not a number, if there is nothing to
        compare, or if another version made the tokens.
        """
        versions = {version for completion in completions for _, version in completion.versions}
        if versions - {self.version}:
            raise self._refused(replica, f"samples with version {min(versions - {self.version})}")
        gaps = self.gaps(completions)
        if not len(gaps):  # replicas that hold the same weights draw the same first tokens
            raise self._refused(replica, f"begins none of {len(completions)} completions as other replicas did")
        gap = float(gaps.mean())
        if not gap <= self.bound:  # NaN must not pass
            found = f"of {len(gaps)} tokens are {gap:.3g} nats off on average, {gaps.max():.3g} at most"
            wanted = f"wanted an average of at most {self.bound:.3g} for {self.dtypes}"
            raise self._refused(replica, f"does not compute what the trainer does: its logprobs {found}; {wanted}")
        return gap

    def gaps(self, completions: Sequence[Completion]) -> FloatArray:
        """Return the absolute differences between the completions' logprobs and the scored ones."""
        pairs = [(completion.logprobs, self._scored_of(i, completion)) for i, completion in enumerate(completions)]
        return np.concatenate([np.abs(own[: len(other)] - other) for own, other in pairs])

    def refuse_base(self, replica: int, completions: Sequence[Completion], base: "Proof") -> None:
        """Raise `WeightSyncError` unless the logprobs differ clearly less from the trainer's than from the base's."""
        own, others = float(self.gaps(completions).mean()), float(base.gaps(completions).mean())
        if not own < TRIAL_SHARE * others:
            raise self._refused(
                replica,
                f"does not apply the adapter: with a random one, its logprobs are {own:.3g} nats off the trainer's on "
                f"average and {others:.3g} off those without it, wanted less than {TRIAL_SHARE:g} of that",
            )

    def _scored_of(self, prompt: int, completion: Completion) -> FloatArray:
        """Return the trainer's logprobs of the tokens, up to the first one that it has not scored."""
        found = np.zeros(0, np.float32)
        for (number, tokens), logprobs in self.scored.items():
            same = np.asarray(tokens[: len(completion.tokens)]) == completion.tokens[: len(tokens)]
            length = len(same) if same.all() else int(same.argmin())
            if number == prompt and length > len(found):
                found = logprobs[:length]
        return found

    def _refused(self, replica: int, what: str) -> WeightSyncError:
        return WeightSyncError(
            f"after the weight sync of version {self.version} replica {replica} of the generator {what}. Either it has "
            "wrong or old weights (a tensor that the engine did not take, a part of a fused module, a packed copy), or "
            "it computes the model in another way (temperature, attention, positions, quantisation). Take another "
            "version of the engine, or another generator. Where the difference is known and wanted, raise "
            "weight_sync.probe.bound; weight_sync.probe.every: 0 compares nothing"
        )


@define(eq=False)
class Probe:
    """Checks the weight syncs that are due, of one attempt of a run."""

    section: "ProbeSection"
    seed: int
    opening: tuple[int, ...]
    """Tokens that every sequence begins with."""
    tokens: IntArray
    """The other tokens of prompts are drawn from these."""
    room: int
    """Longest sequence, in tokens; 0: no limit is known."""
    temperature: float
    dtypes: tuple[str, str]
    """Dtype of generator and trainer."""
    replicas: int
    generator: "Generator"
    score: "Callable[[Batch, Weights], Any]"
    """Returns the trainer's logprobs [N] with a set of weights."""
    run: Callable[[Coroutine[Any, Any, Any]], Any]
    """Runs a coroutine on the event loop of the generator's requests, and waits for it."""
    trial: bool = False
    """Whether a sync of `trial` weights must come before the next one. False after replicas have passed it."""
    overdue: bool = field(default=False, init=False)
    """Whether a replica came back to weights that were not checked."""
    _handed_over: int = field(default=0, init=False)
    _gap: float | None = field(default=None, init=False)

    def due(self, version: int) -> bool:
        """Return whether this weight sync, the next of this attempt, must be checked."""
        self._handed_over += 1
        return self._handed_over <= ALWAYS or version % self.section.every == 0 or self.overdue

    def __call__(self, version: int, weights: "Weights" = "policy") -> Proof | None:
        """Check all replicas that are present, while the trainer still holds the weights that it sent.

        Return the proof that restarted replicas must pass, or None if no replica is present. Raises `WeightSyncError`;
        see `Proof.check`.
        """
        proof = self._drawn(version)
        self.overdue = False  # from now on, a replica that comes back sets it again
        answers: Sequence[Sequence[Completion] | None] = self.run(self._ask(proof))
        there = {replica: found for replica, found in enumerate(answers) if found is not None}
        if not there:
            self.overdue = True
            return None
        proof = evolve(proof, scored=self._scored(proof, there.values(), weights))
        self._gap = max(proof.check(replica, found) for replica, found in there.items())
        if weights == "trial":
            base = evolve(proof, scored=self._scored(proof, there.values(), "base"))
            for replica, found in there.items():
                proof.refuse_base(replica, found, base)
            self.trial = False
        return proof

    def metrics(self) -> dict[str, Metric]:
        """Return `probe/logprob_gap` once for each check: the mean of the worst replica."""
        gap, self._gap = self._gap, None
        return {} if gap is None else {"probe/logprob_gap": largest(gap)}

    def _drawn(self, version: int) -> Proof:
        rng = randomness.generator(self.seed, "probe", version)
        length, sampled = PROMPT_TOKENS, self.section.tokens
        if self.room:
            sampled = max(1, min(sampled, self.room // 2))
            length = max(1, min(length, self.room - sampled - len(self.opening)))
        prompts = [[*self.opening, *rng.choice(self.tokens, length)] for _ in range(self.section.prompts)]
        own = self.section.bound
        return Proof(
            version, tuple(np.asarray(prompt, np.int64) for prompt in prompts), Sampling(sampled, self.temperature),
            tuple(randomness.derive_seed(self.seed, "probe", version, i) for i in range(len(prompts))),
            # Dividing logits by less than 1 enlarges their differences.
            (bound_of(*self.dtypes) if own is None else own) / min(1.0, self.temperature),
            f"a generator in {self.dtypes[0]}, a trainer in {self.dtypes[1]} and temperature {self.temperature:g}",
        )  # fmt: skip

    async def _ask(self, proof: Proof) -> list[list[Completion] | None]:
        from whet.rollout.event_loop import gather_or_cancel

        async def one(replica: int) -> list[Completion] | None:
            try:
                return await gather_or_cancel(map(self.generator.generate, proof.requests(replica)))
            except RequestLost:
                return None

        return await gather_or_cancel(map(one, range(self.replicas)))

    def _scored(self, proof: Proof, answers: Iterable[Sequence[Completion]], weights: "Weights") -> Scored:
        """Return the trainer's scores of all completions. A completion that several replicas made is scored once."""
        made = list(dict.fromkeys((i, tuple(c.tokens.tolist())) for found in answers for i, c in enumerate(found)))
        batch = self._batch([(proof.prompts[i], tokens) for i, tokens in made])
        logprobs, ends = np.asarray(self.score(batch, weights)), np.cumsum(batch["lengths"])
        return {key: logprobs[end - len(key[1]) : end] for key, end in zip(made, ends, strict=True)}

    def _batch(self, made: Sequence[tuple[IntArray, tuple[int, ...]]]) -> Batch:
        sequences = [
            {
                "tokens": np.concatenate([prompt, np.asarray(tokens, np.int64)]),
                "loss_mask": np.arange(len(prompt) + len(tokens)) >= len(prompt),
            }
            for prompt, tokens in made
        ]
        batch = from_sequences(sequences, prompt_lengths=[len(prompt) for prompt, _ in made])
        return batch.with_columns(temperature=np.full(len(made), self.temperature, np.float32))
