"""A taskset of one turn: two weighted rewards and a metric."""

import verifiers.v1 as vf

__all__ = ["Sums"]


class Data(vf.TaskData):
    answer: int


class Sum(vf.Task[Data]):
    @vf.reward
    async def correct(self, trace) -> float:
        return float(trace.last_reply == str(self.data.answer))

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        if trace.last_reply == "break":
            raise RuntimeError("the scorer broke")
        return float(len(trace.last_reply) <= 3)

    @vf.metric
    async def letters(self, trace) -> float:
        return float(len(trace.last_reply))


class Config(vf.TasksetConfig):
    n: int = 40
    first: int = 1


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for i in range(self.config.first, self.config.first + self.config.n):
            yield Sum(Data(prompt=f"{i} plus {i}?", system_prompt="Answer with a number.", answer=2 * i))
