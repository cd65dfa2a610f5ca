"""A taskset without end whose tasks are solved with a tool, whose server all episodes share."""

import itertools

import verifiers.v1 as vf

__all__ = ["Shelf"]


class Tools(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    def look(self, shelf: int) -> str:
        """Return how many books are on a shelf."""
        return f"{shelf * 7 % 10} books"


class Data(vf.TaskData):
    shelf: int


class Count(vf.Task[Data]):
    @vf.reward
    async def counted(self, trace) -> float:
        return float(trace.last_reply == str(self.data.shelf * 7 % 10))


class Shelf(vf.Taskset[Count]):
    INFINITE = True

    @classmethod
    def toolsets(cls, config):
        return [Tools(vf.SharedToolsetConfig())]

    def load(self):
        for shelf in itertools.count(11):
            yield Count(Data(prompt=f"How many books are on shelf {shelf}?", shelf=shelf))


if __name__ == "__main__":
    Tools.run()
