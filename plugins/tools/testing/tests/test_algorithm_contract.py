"""The contract of algorithms holds for good ones, and each rule catches one that breaks it."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from whet.component import AlgorithmFacts, Selection, resolve
from whet.config.structure import structure
from whet.errors import PluginError
from whet.plugins.registry import Registry
from whet_chat.tokenizer import ChatTokenizer
from whet_testing.contracts.algorithm import AlgorithmContract
from whet_testing.contracts.component import MODEL

GOOD = """
    from attrs import frozen
    from whet import hookimpl
    from whet.component import AlgorithmFacts, Component, RoleNeed, Selection
    from whet.config.sections import selection

    @frozen
    class Config:
        loss: Selection = selection("losses", "made-up-loss")

    @frozen
    class LossConfig:
        pass

    def make_loss(config):
        from whet_testing.losses import Weighted
        return Weighted({})

    def facts(config, model):
        return AlgorithmFacts(
            inputs=frozenset({"rollouts"}), columns_written=frozenset({"advantages"}),
            group_size=4, groups_per_step=3, optimizer_steps=lambda steps: {"backend": 2 * steps},
        )

    class Algorithm:
        def __init__(self, config):
            self.config = config
            self.carried = 0

        def run(self, parts):
            for step in parts.steps:
                batch = parts.rollouts.take(3)
                batch = batch.with_columns(advantages=batch["reward"])
                for part in batch.split(2, seed=step.seed):
                    step.log(parts.backend.train(part, parts.loss))
                parts.sync_weights(version=step.number)
                step.finish(batch)

    @hookimpl
    def whet_algorithms():
        return [Component("made-up", Config, f"{__name__}:Algorithm", f"{__name__}:facts")]

    @hookimpl
    def whet_losses():
        return [Component("made-up-loss", LossConfig, f"{__name__}:make_loss")]
"""
OFFLINE = [
    ('frozenset({"rollouts"})', 'frozenset({"data"}), data_format="conversations"'),
    ("for step in parts.steps:", "data = parts.data.prepare(encode)\n            for step in parts.steps:"),
    ("batch = parts.rollouts.take(3)", "batch = data.batch(step.number, 4)"),
    ('advantages=batch["reward"]', 'advantages=batch["lengths"].astype("float32")'),
    (
        "class Algorithm:",
        """def encode(record, tokenizer):
        from whet.data.messages import conversation
        row = tokenizer.training(conversation(record["messages"]))
        return [{"tokens": row.tokens, "loss_mask": row.loss_mask, "prompt_length": row.prompt_length}]

    class Algorithm:""",
    ),
]


class MadeUp(AlgorithmContract):
    use = "made-up"


def plugin(folder: Path, *changes: tuple[str, str]) -> Registry:
    source = GOOD
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    file = folder / "made_up_plugin.py"
    file.write_text(textwrap.dedent(source))
    registry = Registry()
    registry.load_file(file)
    assert not registry.broken, registry.broken
    return registry


def select(registry: Registry) -> tuple[Selection, AlgorithmFacts]:
    offer = registry.find("algorithms", "made-up")
    config: Any = structure({}, offer.component.config, registry)
    return Selection("algorithms", offer.component, config), resolve(offer.component.facts)(config, MODEL)


class TestOfAGoodAlgorithm(MadeUp):
    @pytest.fixture(scope="class")
    @classmethod
    def registry(cls, tmp_path_factory: pytest.TempPathFactory) -> Registry:
        return plugin(tmp_path_factory.mktemp("plugin"))


class TestOfAGoodOfflineAlgorithm(MadeUp):
    @pytest.fixture(scope="class")
    @classmethod
    def registry(cls, tmp_path_factory: pytest.TempPathFactory) -> Registry:
        return plugin(tmp_path_factory.mktemp("plugin"), *OFFLINE)


MUTANTS = {
    "trains nothing": ("batch.split(2, seed=step.seed)", "[]", "test_every_step_trains_and_is_finished_once_in_order"),
    "never finishes": ("step.finish(batch)", "pass", "test_every_step_trains_and_is_finished_once_in_order"),
    "counts for itself": (
        "parts.sync_weights(version=step.number)",
        "parts.sync_weights(version=self.carried); self.carried += 1",
        "test_weights_are_synced_after_each_step_that_rollouts_feed",
    ),
    "syncs weights too soon": (
        "batch = parts.rollouts",
        "parts.sync_weights(version=step.number); batch = parts.rollouts",
        "test_weights_are_synced_after_each_step_that_rollouts_feed",
    ),
    "carries state": (
        'advantages=batch["reward"]',
        'advantages=batch["reward"] + self.carried); self.carried += 1; batch.with_columns(',
        "test_it_goes_on_after_the_steps_that_are_done",
    ),
    "takes more optimizer steps": (
        "batch.split(2,", "batch.split(3,", "test_it_takes_as_many_optimizer_steps_as_its_facts_say"
    ),
    "does not count its optimizer steps": (
        'lambda steps: {"backend": 2 * steps}', "None", "test_it_takes_as_many_optimizer_steps_as_its_facts_say"
    ),
    "takes too few": ("take(3)", "take(2)", "test_it_takes_as_many_groups_as_its_facts_say"),
    "forgets a column": ("advantages=batch", "advantage=batch", "test_the_loss_gets_the_columns_that_it_reads"),
    "hides a column": (
        'advantages=batch["reward"]',
        'advantages=batch["reward"], secret=batch["reward"]',
        "test_it_adds_no_columns_but_those_of_its_facts",
    ),
    "sleeps": ("parts.sync_weights(", "parts.backend.sleep(); parts.sync_weights(",
               "test_it_leaves_sleep_and_checkpoints_to_others"),
    "trains before it": ("for step in", "parts.backend.train(parts.rollouts.take(1), None)\n            for step in",
                         "test_a_run_without_steps_does_nothing"),
}  # fmt: skip


@pytest.mark.parametrize("what", MUTANTS)
def test_the_contract_catches_an_algorithm_that(what: str, tmp_path: Path, tiny_model_folder: Path) -> None:
    old, new, rule = MUTANTS[what]
    selection, facts = select(plugin(tmp_path, (old, new)))
    with pytest.raises((AssertionError, ValueError)):
        getattr(MadeUp(), rule)(selection, facts, ChatTokenizer(tiny_model_folder), tmp_path)


FINISH = "step.finish(batch)"
SILENT = {
    "is async": (
        "def run(self, parts):", "async def run(self, parts):", "test_a_run_without_steps_does_nothing",
        "the algorithm did nothing: `Algorithm.run` must neither be `async def` nor contain `yield`",
    ),
    "is a generator": (
        FINISH, FINISH + "; yield", "test_a_run_without_steps_does_nothing", "nor contain `yield`"
    ),
    "keeps a NumPy number": (
        FINISH, "parts.steps.state['n'] = batch['lengths'].sum(); " + FINISH,
        "test_every_step_trains_and_is_finished_once_in_order",
        r"steps.state\['n'\] gave what JSON cannot store: Object of type int64",
    ),
    "keeps a tuple": (
        FINISH, "parts.steps.state['n'] = (1, 2); " + FINISH, "test_every_step_trains_and_is_finished_once_in_order",
        r"steps.state\['n'\] gave .*; JSON returns {'n': \[1, 2\]}",
    ),
    "writes a NumPy number to a table": (
        FINISH, "step.table('worst', [{'text': 'a', 'n': batch['lengths'][0]}]); " + FINISH,
        "test_every_step_trains_and_is_finished_once_in_order",
        r"step.table\('worst'\) has the row .*, in which 'n' is np.int64\(\d+\); wanted builtins: write int",
    ),
    "writes rows without names": (
        FINISH, "step.table('worst', [[1, 2]]); " + FINISH, "test_every_step_trains_and_is_finished_once_in_order",
        r"has the row \[1, 2\]; wanted a mapping",
    ),
    "logs an array": (
        FINISH, "from whet.data.metrics import mean; step.log({'a': mean(batch['lengths'])}); " + FINISH,
        "test_every_step_trains_and_is_finished_once_in_order",
        r"step.log: a is a mean of array\(.*, wanted one number: write float\(values.sum",
    ),
    "logs a text": (
        FINISH, "step.log({'a': 'much'}); " + FINISH, "test_every_step_trains_and_is_finished_once_in_order",
        "step.log: a is 'much', wanted a number",
    ),
    "takes the name of a key": (
        FINISH, "step.log({'step': 1.0}); " + FINISH, "test_every_step_trains_and_is_finished_once_in_order",
        "a metric is named 'step', a key of every row",
    ),
    "hides a column": (
        'advantages=batch["reward"]', 'advantages=batch["reward"], secret=batch["reward"]',
        "test_it_adds_no_columns_but_those_of_its_facts",
        "has the columns secret, .* Add them to AlgorithmFacts.columns_written",
    ),
    "hides a column that its loss reads": (
        'columns_written=frozenset({"advantages"}),', "", "test_its_facts_name_the_columns_that_the_loss_reads",
        "the loss reads advantages, .* Add it to AlgorithmFacts.columns_written",
    ),
    "hides what it scores": (
        FINISH, "parts.backend.score(batch, ('logprobs', 'topk_ids:3')); " + FINISH,
        "test_it_scores_only_what_its_facts_say", "it scores topk_ids, .* Add it to AlgorithmFacts.outputs_needed",
    ),
    "hides whose scores it takes": (
        FINISH, "parts.backend.score(batch, ('logprobs',), weights='reference'); " + FINISH,
        "test_it_scores_only_what_its_facts_say",
        "with the weights reference, .* Add them to AlgorithmFacts.weights_needed",
    ),
    "hides what it scores with a role": (
        FINISH, "parts.roles['judge'].score(batch, ('values',)); " + FINISH,
        "test_it_scores_only_what_its_facts_say",
        "it scores values with the role judge, .* Add it to the `outputs` of its RoleNeed",
    ),
    "trains a role in secret": (
        FINISH, "parts.roles['judge'].train(batch, parts.loss); " + FINISH,
        "test_it_trains_only_models_that_its_facts_call_trained",
        "it trains the role judge, .* Write RoleNeed",
    ),
}  # fmt: skip
"""Algorithms with a silent mistake: what changes, the rule that finds it, and the message."""
JUDGE = ("group_size=4, ", 'roles={"judge": RoleNeed()}, group_size=4, ')


@pytest.mark.parametrize("what", SILENT)
@pytest.mark.parametrize("inputs", ["rollouts", "data"])
def test_the_contract_says_what_is_silently_wrong(
    what: str, inputs: str, tmp_path: Path, tiny_model_folder: Path
) -> None:
    old, new, rule, words = SILENT[what]
    if inputs == "data" and old not in GOOD.replace('advantages=batch["reward"]', ""):
        pytest.skip("what an offline algorithm makes of its records is its own affair")
    offline = OFFLINE if inputs == "data" else []
    selection, facts = select(plugin(tmp_path, JUDGE, *offline, (old, new)))
    with pytest.raises((AssertionError, PluginError), match=f"(?s){words}"):
        getattr(MadeUp(), rule)(selection, facts, ChatTokenizer(tiny_model_folder), tmp_path)


def test_an_algorithm_may_log_numbers_of_numpy_and_keep_lists(tmp_path: Path, tiny_model_folder: Path) -> None:
    kept = "parts.steps.state.setdefault('seen', []).append(step.number); step.log({'a': batch['reward'].mean()})"
    selection, facts = select(plugin(tmp_path, (FINISH, f"{kept}; {FINISH}")))
    chat = ChatTokenizer(tiny_model_folder)
    MadeUp().test_every_step_trains_and_is_finished_once_in_order(selection, facts, chat, tmp_path)
    states = MadeUp()._run(selection, facts, chat, tmp_path, steps=3).states
    assert states == {1: {"seen": [1]}, 2: {"seen": [1, 2]}, 3: {"seen": [1, 2, 3]}}


@pytest.mark.parametrize("change", [('{"rollouts"}', "{}"), ('{"rollouts"}', '{"data"}'), ("group_size=4, ", "")])
def test_the_contract_catches_facts_that_say_too_little(change: tuple[str, str], tmp_path: Path) -> None:
    _, facts = select(plugin(tmp_path, change))
    with pytest.raises(AssertionError):
        MadeUp().test_its_facts_say_what_it_feeds_on(facts)
