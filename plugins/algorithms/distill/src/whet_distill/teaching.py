"""What teachers think of a batch, as columns of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.component import LossFacts
from whet.data.batch import Batch
from whet.data.model_info import locate, read_model
from whet.errors import ConfigError, WhetError
from whet.plan.plan import facts_of
from whet_chat.same_tokens import folders_of_roles, refuse_other_tokens
from whet_distill.config import TOKEN_COLUMNS, TOPK_COLUMNS, TaughtConfig

if TYPE_CHECKING:
    from whet.data.model_info import ModelInfo
    from whet.interfaces.algorithm import Parts
    from whet.interfaces.backend import Backend

TEACHER = "teacher"
SPARE = 16
"""Further likely tokens that are asked for where models have different numbers of rows of logits: rows that no token of
the tokenizer has are padding, such as those of Qwen2.5, and not all models have them."""


class Teaching:
    """Adds to a batch what its loss reads of the teachers, each asked about its own environments."""

    def __init__(
        self, config: TaughtConfig, parts: "Parts", model: "ModelInfo", teachers: Mapping[str, str] | None = None
    ) -> None:
        """Take `teachers` as roles by environment. Raises `ConfigError` if one has other tokens than the student, or if
        all together have fewer than `topk`.
        """
        self._config, self._student, self._roles = config, parts.backend, parts.roles
        self._teachers = teachers or {}
        self._read = facts_of(config.loss, model, LossFacts).columns_read
        trained = parts.config.backend
        if trained and (beside := getattr(trained.config, "teacher", "")):
            refuse_other_tokens("backend.teacher", locate(beside, config_only=True), parts.chat.folder)
        names = {TEACHER, *self._teachers.values()} & parts.roles.keys()  # environments may have roles of their own
        rows = dict.fromkeys(names, model.vocab_size)
        rows |= {name: read_model(folder).vocab_size for name, folder in folders_of_roles(parts, names).items()}
        self._shared_rows = min([model.vocab_size, *rows.values()])
        asked = min(rows.values(), default=0) if config.topk_of == "teacher" else model.vocab_size
        self._k = min(config.topk + SPARE * (len({model.vocab_size, *rows.values()}) > 1), asked)
        if self._read & TOPK_COLUMNS and config.topk > self._shared_rows:
            words = f"is {config.topk}, more than the {self._shared_rows} tokens that student and teachers have"
            raise ConfigError(f"algorithm.topk: {words}; lower it")

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with `topk_ids` and `teacher_topk_logprobs` [N, K], or `teacher_logprobs` [N]."""
        if self._read & TOPK_COLUMNS:
            batch = self._with_topk(batch)
        if self._read & TOKEN_COLUMNS:
            batch = batch.with_columns(teacher_logprobs=self._ask(batch, ("logprobs",))["logprobs"])
        return batch

    def _with_topk(self, batch: Batch) -> Batch:
        ids, logprobs = f"topk_ids:{self._k}", f"topk_logprobs:{self._k}"
        if self._config.topk_of == "teacher":
            found = self._ask(batch, (ids, logprobs))
            kept = self._shared(found[ids])
            found = {name: np.take_along_axis(values, kept, axis=1) for name, values in found.items()}
            return batch.with_columns(topk_ids=found[ids], teacher_topk_logprobs=found[logprobs])
        likeliest = self._student.score(batch, (ids,))[ids]
        batch = batch.with_columns(topk_ids=np.take_along_axis(likeliest, self._shared(likeliest), axis=1))
        return batch.with_columns(teacher_topk_logprobs=self._ask(batch, ("logprobs_at",))["logprobs_at"])

    def _shared(self, ids: Any) -> Any:
        """Return which of the likeliest tokens [N, K + spare] to keep: the first K that all models have [N, K]."""
        lacking = ids >= self._shared_rows
        kept = np.argsort(lacking, axis=1, kind="stable")[:, : self._config.topk]
        if np.take_along_axis(lacking, kept, axis=1).any():
            raise WhetError(
                f"of the likeliest tokens of a model, more than {self._k - self._config.topk} are rows of padding from "
                f"{self._shared_rows} on, which another model does not have; pad its embeddings to the same size"
            )
        return kept

    def _ask(self, batch: Batch, outputs: tuple[str, ...]) -> dict[str, Any]:
        """Ask each sequence's teacher."""
        chosen = self._chosen(batch)
        if len(set(chosen)) <= 1:
            return self._teacher(chosen[0] if chosen else TEACHER).score(batch, outputs)
        parts: dict[str, Any] = {}
        for role in dict.fromkeys(chosen):
            theirs = np.array([one == role for one in chosen])
            found = self._teacher(role).score(batch.where(theirs), outputs)
            places = np.repeat(theirs, batch["lengths"])
            for name, values in found.items():
                room = parts.setdefault(name, np.zeros((batch.tokens, *values.shape[1:]), values.dtype))
                room[places] = values
        return parts

    def _chosen(self, batch: Batch) -> list[str]:
        if not self._teachers or "env" not in batch:
            return [TEACHER] * batch.sequences
        environments = batch.info.get("environments", ())
        return [self._teachers.get(environments[i], TEACHER) for i in batch["env"].tolist()]

    def _teacher(self, role: str) -> "Backend":
        return self._roles[role]
