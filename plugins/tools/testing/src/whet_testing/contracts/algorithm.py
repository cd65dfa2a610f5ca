"""The rules that every algorithm must keep.

    class TestGrpo(AlgorithmContract):
        use = "grpo"

A test runs the loop of the algorithm for a few steps on stand-ins that record each call.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from whet.component import AdvantagesFacts, AlgorithmFacts, Selection, Spec, resolve
from whet.config.build import build, to_spec
from whet.config.sections import Config, DataFile, DataSection, ModelSection, RunSection
from whet.config.structure import structure
from whet.data.batch import SEQUENCE_COLUMNS, TOKEN_COLUMNS
from whet.data.model_info import read_model
from whet.interfaces.algorithm import Algorithm, OfflineParts, OnlineParts, Parts
from whet.interfaces.state import check_ran
from whet.plan.plan import facts_of
from whet.plugins.registry import Registry, load_plugins
from whet_chat.tokenizer import ChatTokenizer
from whet_data.offline import OfflineData
from whet_testing.contracts.component import MODEL
from whet_testing.fakes import FakeGenerator
from whet_testing.steps import ROLLOUT_COLUMNS, Watch, WatchedBackend, WatchedRollouts, WatchedSteps, watched_sync

RECORDS: dict[str, list[dict[str, Any]]] = {
    "conversations": [
        {"messages": [{"role": "user", "content": f"{i}+1?"}, {"role": "assistant", "content": f"{i + 1}"}]}
        for i in range(20)
    ],
    "pairs": [{"prompt": f"{i}+1?", "chosen": f"{i + 1}", "rejected": f"{i}"} for i in range(20)],
    "labelled": [{"prompt": f"{i}+1?", "completion": f"{i + i % 2}", "label": i % 2 == 1} for i in range(20)],
}
"""Twenty records of each data format."""


class AlgorithmContract:
    """Inherit this class and set `use`."""

    use: str = ""
    """Name of the component, as after `use:` in a config. The plugin must be installed, or be one of `plugins`."""
    plugins: Sequence[str | Path] = ()
    """Files of plugins, as under `plugins:` of a config."""
    document: Mapping[str, Any] = {}
    """The other keys of the section `algorithm`."""
    records: list[dict[str, Any]] | None = None
    """Records for an offline algorithm. None: the records of `RECORDS` in the data format of its facts."""

    @pytest.fixture(scope="class")
    @classmethod
    def registry(cls) -> Registry:
        """Return the registry of the installed plugins and of the files."""
        registry = load_plugins()
        for file in cls.plugins:
            registry.load_file(Path(file))
        return registry

    @pytest.fixture
    def selection(self, registry: Registry) -> Selection:
        """Return the selection that a config file with `use` and `document` would make."""
        offer = registry.find("algorithms", self.use)
        config: Any = structure(dict(self.document), offer.component.config, registry)
        return Selection("algorithms", offer.component, config, offer.distribution)

    @pytest.fixture
    def facts(self, selection: Selection) -> AlgorithmFacts:
        """Return the facts of the algorithm."""
        found = resolve(selection.component.facts)(selection.config, MODEL)
        assert isinstance(found, AlgorithmFacts)
        return found

    @pytest.fixture
    def chat(self, tiny_model_folder: Path) -> ChatTokenizer:
        """Return the chat tokenizer of the tiny model."""
        return ChatTokenizer(tiny_model_folder)

    def test_it_is_an_algorithm(self, selection: Selection) -> None:
        assert isinstance(resolve(selection.component.target)(selection.config), Algorithm)

    def test_its_facts_say_what_it_feeds_on(self, facts: AlgorithmFacts) -> None:
        assert facts.inputs
        assert facts.inputs <= {"rollouts", "data"}
        if "data" in facts.inputs:
            assert facts.data_format, "an algorithm that feeds on data says which records it reads"
        if "rollouts" in facts.inputs:
            assert facts.group_size is not None
            assert facts.groups_per_step is not None
            assert min(facts.group_size, facts.groups_per_step) >= 1

    def test_every_step_trains_and_is_finished_once_in_order(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        watch = self._run(selection, facts, chat, tmp_path, steps=3)
        assert [event.value for event in watch.named("finish")] == [1, 2, 3]
        assert {event.step for event in watch.named("train")} == {1, 2, 3}

    def test_it_goes_on_after_the_steps_that_are_done(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        whole = self._run(selection, facts, chat, tmp_path, steps=3)
        rest = self._run(selection, facts, chat, tmp_path, steps=3, done=2, state=whole.states[2])
        assert [event.value for event in rest.named("finish")] == [3]
        expected = [event.batch for event in whole.named("train") if event.step == 3]
        found = [event.batch for event in rest.named("train")]
        assert len(found) == len(expected)
        for one, other in zip(expected, found, strict=True):
            assert one is not None
            assert other is not None
            assert all((one[name] == other[name]).all() for name in one.columns), "what it did before decides a step"

    def test_a_run_without_steps_does_nothing(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        watch = self._run(selection, facts, chat, tmp_path, steps=3, done=3)
        assert not watch.named("train")
        assert not watch.named("finish")

    def test_the_loss_gets_the_columns_that_it_reads(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        watch = self._run(selection, facts, chat, tmp_path, steps=2)
        for event in watch.named("train"):
            assert event.batch is not None
            missing = [name for name in build(event.value).columns if name not in event.batch]
            assert not missing, f"the loss reads {missing}, and the batch has {event.batch.columns}"

    def test_its_facts_name_the_columns_that_the_loss_reads(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        watch = self._run(selection, facts, chat, tmp_path, steps=2)
        sampled = {*ROLLOUT_COLUMNS, "greedy_reward"} if "rollouts" in facts.inputs else set()
        known = {*TOKEN_COLUMNS, *SEQUENCE_COLUMNS, *sampled, *facts.columns_written}
        for event in [event for one in (watch, *watch.roles.values()) for event in one.named("train")]:
            hidden = sorted(set(build(event.value).columns) - known)
            assert not hidden, (
                f"the loss reads {', '.join(hidden)}, which the algorithm adds and its facts do not name: `whet check` "
                "would refuse the loss. Add it to AlgorithmFacts.columns_written"
            )

    def test_it_adds_no_columns_but_those_of_its_facts(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        if facts.inputs != {"rollouts"}:
            pytest.skip("what an offline algorithm makes of its records is its own affair")
        watch = self._run(selection, facts, chat, tmp_path, steps=2)
        known = {*TOKEN_COLUMNS, *SEQUENCE_COLUMNS, *ROLLOUT_COLUMNS, "greedy_reward", *facts.columns_written}
        for event in watch.named("train"):
            assert event.batch is not None
            hidden = sorted(set(event.batch.columns) - known)
            assert not hidden, (
                f"the batch has the columns {', '.join(hidden)}, which the algorithm adds and its facts do not name: "
                "`whet check` would refuse a loss that reads them. Add them to AlgorithmFacts.columns_written"
            )

    def test_it_scores_only_what_its_facts_say(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        watch = self._run(selection, facts, chat, tmp_path, steps=2)
        given = {"": (watch, facts.outputs_needed | {"logprobs"}, "AlgorithmFacts.outputs_needed")}
        for name, need in facts.roles.items():
            given[f" with the role {name}"] = watch.roles[name], need.outputs, "the `outputs` of its RoleNeed"
        for where, (calls, known, place) in given.items():
            scored = {output.partition(":")[0] for event in calls.named("score") for output in event.value}
            hidden = sorted(scored - known)
            assert not hidden, (
                f"it scores {', '.join(hidden)}{where}, and its facts do not say so: `whet check` would accept a "
                f"backend that cannot compute it. Add it to {place}"
            )
        hidden = sorted({event.weights for event in watch.named("score")} - {"policy", *facts.weights_needed})
        assert not hidden, (
            f"it scores with the weights {', '.join(hidden)}, and its facts do not say so: `whet check` would accept a "
            "backend that does not hold them. Add them to AlgorithmFacts.weights_needed"
        )

    def test_it_trains_only_models_that_its_facts_call_trained(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        watch = self._run(selection, facts, chat, tmp_path, steps=2)
        for name, need in facts.roles.items():
            assert need.trained or not watch.roles[name].named("train"), (
                f"it trains the role {name}, and its facts do not say so: a checkpoint would lack its weights. Write "
                "RoleNeed(..., trained=True)"
            )

    def test_it_takes_as_many_groups_as_its_facts_say(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        if "rollouts" not in facts.inputs:
            pytest.skip("it is not fed by rollouts")
        watch = self._run(selection, facts, chat, tmp_path, steps=2)
        taken = {step: sum(e.value for e in watch.named("take") if e.step == step) for step in (1, 2)}
        assert taken == {1: facts.groups_per_step, 2: facts.groups_per_step}

    def test_a_step_takes_as_many_records_as_its_facts_say(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        if facts.records_per_step is None:
            pytest.skip("it does not state how many records a step takes")
        for event in self._run(selection, facts, chat, tmp_path, steps=2).named("finish"):
            assert event.batch is not None
            assert len(event.batch.units()) == facts.records_per_step, "run.epochs would take another number of steps"

    def test_it_takes_as_many_optimizer_steps_as_its_facts_say(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        """Override it where the number depends on the data."""
        expected = facts.optimizer_steps(3) if facts.optimizer_steps else {}
        watch = self._run(selection, facts, chat, tmp_path, steps=3)
        trained = {"backend": watch, **{name: watch.roles[name] for name, need in facts.roles.items() if need.trained}}
        assert set(expected) <= set(trained)
        found = {role: len(calls.named("train")) for role, calls in trained.items()}
        assert found == {**dict.fromkeys(trained, 3), **expected}, "learning rates would fall over another number"

    def test_weights_are_synced_after_each_step_that_rollouts_feed(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        if "rollouts" not in facts.inputs:
            pytest.skip("it is not fed by rollouts")
        watch = self._run(selection, facts, chat, tmp_path, steps=3)
        assert [event.value for event in watch.named("sync_weights")] == [1, 2, 3]
        for step in (1, 2, 3):
            names = [event.name for event in watch.events if event.step == step]
            last_train = len(names) - 1 - names[::-1].index("train")
            assert last_train < names.index("sync_weights") < names.index("finish")

    def test_it_leaves_sleep_and_checkpoints_to_others(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, tmp_path: Path
    ) -> None:
        watch = self._run(selection, facts, chat, tmp_path, steps=2)
        assert not {"sleep", "wake", "save"} & {event.name for event in watch.events}

    def _run(
        self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, folder: Path, steps: int, done: int = 0,
        state: Mapping[str, Any] | None = None,
    ) -> Watch:  # fmt: skip
        watch = Watch()
        algorithm = resolve(selection.component.target)(selection.config)
        parts = self._parts(watch, selection, facts, chat, folder, WatchedSteps(watch, steps, done, state))
        check_ran(algorithm.run(parts), "the algorithm")
        return watch

    def _parts(
        self,
        watch: Watch,
        selection: Selection,
        facts: AlgorithmFacts,
        chat: ChatTokenizer,
        folder: Path,
        steps: WatchedSteps,
    ) -> Parts:
        config: Any = selection.config
        loss = to_spec(config.loss) if _is_loss(getattr(config, "loss", None)) else Spec("")
        advantages = getattr(config, "advantages", None)
        greedy = isinstance(advantages, Selection) and facts_of(advantages, MODEL, AdvantagesFacts).greedy_sample
        whole = Config(
            run=RunSection(folder=str(folder), steps=3),
            model=ModelSection(path=str(chat.folder)),
            algorithm=selection,
            backend=None,  # type: ignore[arg-type]  # no code reads it: the backend is a stand-in
        )
        common: dict[str, Any] = {
            "config": whole,
            "algorithm": resolve(selection.component.target)(selection.config),
            "hooks": None,
            "backend": WatchedBackend(watch),
            "roles": {name: WatchedBackend(watch.roles.setdefault(name, Watch())) for name in facts.roles},
            "chat": chat,
            "loss": loss,
            "sync_weights": watched_sync(watch),
            "steps": steps,
            "evaluate": lambda step: {},
            "seed": 0,
        }
        if "rollouts" in facts.inputs:
            rollouts = WatchedRollouts(watch, facts.group_size or 1, greedy)
            return OnlineParts(**common, generator=FakeGenerator("a"), rollouts=rollouts)
        return OfflineParts(**common, generator=None, data=self._data(selection, facts, chat, folder))

    def _data(self, selection: Selection, facts: AlgorithmFacts, chat: ChatTokenizer, folder: Path) -> OfflineData:
        records = self.records or RECORDS.get(facts.data_format, [])
        file = folder / "data.jsonl"
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        encode = resolve(facts.encode)(selection.config, read_model(chat.folder)) if facts.encode else None
        return OfflineData(DataSection(train=[DataFile(str(file))]), chat, seed=0, max_length=0, encode=encode)


def _is_loss(value: object) -> bool:
    return isinstance(value, Selection) and value.kind == "losses"
