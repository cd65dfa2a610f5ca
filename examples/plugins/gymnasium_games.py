"""Text games of Gymnasium (`pip install gymnasium`), an action in words each turn."""

from attrs import field, frozen

import whet


@frozen
class GymnasiumConfig:
    """A game of Gymnasium that renders itself as text."""

    game: str = "FrozenLake-v1"
    """Id of the game; it must have the render mode `ansi`."""
    actions: list[str] = field(factory=lambda: ["left", "down", "right", "up"])
    """The word of each action, in the order of the game's numbers."""
    options: dict[str, object] = field(factory=dict)
    """Further arguments of `gymnasium.make`, e.g. `{is_slippery: false}`."""
    turns: int = 20
    """Most actions of an episode."""
    tasks: int = 500
    """Tasks of each split: games with different seeds."""


class Game:
    reward_weights = {"understood": 0.0}  # recorded, but not a part of the total

    def __init__(self, config):
        self._config = config
        self._made().close()  # a wrong id or option ends the run here, not in the first episode

    def tasks(self, split):
        if split not in ("train", "test"):
            raise whet.DataError(f"there is no split {split!r}; there are train, test")
        first = self._config.tasks if split == "test" else 0
        return [whet.Task("Let us play.", {"seed": first + game}) for game in range(self._config.tasks)]

    async def run(self, task, model):
        game, words = self._made(), self._config.actions
        game.reset(seed=task.data["seed"])
        asked, total, turns, understood = task.prompt[0].text, 0.0, 0, 0
        while turns < self._config.turns:
            turns += 1
            view = "\n".join((asked, game.render(), f"Answer with one word: {', '.join(words)}."))
            word = (await model.reply(view)).text.strip().lower()
            if word not in words:
                asked = "I do not understand."
                continue
            asked, understood = "", understood + 1
            _, reward, ended, cut, _ = game.step(words.index(word))
            total += float(reward)
            if ended or cut:
                break
        game.close()
        return {"return": total, "understood": understood / turns}

    def close(self):
        pass

    def _made(self):
        import gymnasium

        return gymnasium.make(self._config.game, render_mode="ansi", **self._config.options)


@whet.hookimpl
def whet_environments():
    return [whet.Component("gymnasium", GymnasiumConfig, ":Game")]
