"""What teachers think of a batch, as columns of it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from whet.component import LossFacts
from whet.data.batch import Batch
from whet.plan.plan import facts_of
from whet_distill.config import TOKEN_COLUMNS, TOPK_COLUMNS, TaughtConfig
from whet_distill.tokenizers import refuse_other_tokens

if TYPE_CHECKING:
    from whet.data.model_info import ModelInfo
    from whet.interfaces.algorithm import Parts
    from whet.interfaces.backend import Backend

TEACHER = "teacher"


class Teaching:
    """Adds to a batch what its loss reads of the teachers, each asked about its own environments."""

    def __init__(
        self, config: TaughtConfig, parts: "Parts", model: "ModelInfo", teachers: Mapping[str, str] | None = None
    ) -> None:
        """Take `teachers` as roles by environment. Raises `ConfigError` where one has other tokens than the student."""
        self._config, self._student, self._roles = config, parts.backend, parts.roles
        self._teachers = teachers or {}
        self._read = facts_of(config.loss, model, LossFacts).columns_read
        for name, role in parts.config.roles.items():
            if name in parts.roles and role.model is not None:
                refuse_other_tokens(name, role.model, parts.chat.folder)

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch with `topk_ids` and `teacher_topk_logprobs` [N, K], or `teacher_logprobs` [N]."""
        if self._read & TOPK_COLUMNS:
            batch = self._with_topk(batch)
        if self._read & TOKEN_COLUMNS:
            batch = batch.with_columns(teacher_logprobs=self._ask(batch, ("logprobs",))["logprobs"])
        return batch

    def _with_topk(self, batch: Batch) -> Batch:
        ids, logprobs = f"topk_ids:{self._config.topk}", f"topk_logprobs:{self._config.topk}"
        if self._config.topk_of == "teacher":
            found = self._ask(batch, (ids, logprobs))
            return batch.with_columns(topk_ids=found[ids], teacher_topk_logprobs=found[logprobs])
        batch = batch.with_columns(topk_ids=self._student.score(batch, (ids,))[ids])
        return batch.with_columns(teacher_topk_logprobs=self._ask(batch, ("logprobs_at",))["logprobs_at"])

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
