"""What teachers think of a batch, as columns of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.component import LossFacts
from whet.data.batch import Batch
from whet.errors import WhetError
from whet.plan.plan import facts_of
from whet_distill.config import TOKEN_COLUMNS, TOPK_COLUMNS, TaughtConfig
from whet_distill.tokenizers import rows_of_teacher

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
        """Take `teachers` as roles by environment. Raises `ConfigError` where one has other tokens than the student."""
        self._config, self._student, self._roles = config, parts.backend, parts.roles
        self._teachers = teachers or {}
        self._read = facts_of(config.loss, model, LossFacts).columns_read
        taught = {name: role.model for name, role in parts.config.roles.items() if name in parts.roles and role.model}
        rows = {rows_of_teacher(name, section, parts.chat.folder) for name, section in taught.items()}
        rows.add(model.vocab_size)
        self._rows, self._spare = min(rows), SPARE * (len(rows) > 1)

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with `topk_ids` and `teacher_topk_logprobs` [N, K], or `teacher_logprobs` [N]."""
        if self._read & TOPK_COLUMNS:
            batch = self._with_topk(batch)
        if self._read & TOKEN_COLUMNS:
            batch = batch.with_columns(teacher_logprobs=self._ask(batch, ("logprobs",))["logprobs"])
        return batch

    def _with_topk(self, batch: Batch) -> Batch:
        k = min(self._config.topk + self._spare, self._rows) if self._spare else self._config.topk
        ids, logprobs = f"topk_ids:{k}", f"topk_logprobs:{k}"
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
        lacking = ids >= self._rows
        kept = np.argsort(lacking, axis=1, kind="stable")[:, : self._config.topk]
        if np.take_along_axis(lacking, kept, axis=1).any():
            raise WhetError(
                f"of the likeliest tokens of a model, more than {self._spare} are rows of padding from {self._rows} "
                "on, which another model does not have; pad its embeddings to the same size"
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
