"""Looks at an engine from within its process, where the tests put it beside `whet_sglang.process`."""

import gc
from typing import Any

from whet_sglang.arguments import LOADER
from whet_sglang.process import Process


class Probe:
    """Does what whet never does."""

    def __init__(self, rank: Any) -> None:
        (process,) = (thing for thing in gc.get_objects() if type(thing) is Process)
        self._manager = process._manager

    async def open_session(self) -> list[Any]:
        """Open a session for new weights, and leave it open."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        return list(await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))

    async def close_session(self) -> list[Any]:
        """Close it."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        return list(await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    async def update_without_session(self) -> list[Any]:
        """Load weights without a session."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[MultiprocessingSerializer.serialize([])], load_format=LOADER, flush_cache=False
        )
        return list(await self._manager.update_weights_from_tensor(update, None))

    def finds(self, tokens: list[int], stop: str) -> dict[str, Any]:
        """Return whether a stop string is found in tokens, and how many of them SGLang itself would look at."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        asked = SamplingParams(stop=[stop], max_new_tokens=99)
        asked.normalize(self._manager.tokenizer)
        request = Req("probe", "", [1], asked)
        request.tokenizer = self._manager.tokenizer
        request.output_ids = list(tokens)
        return {"found": request._check_str_based_finish(1), "looked_at": asked.stop_str_max_len + 1}
