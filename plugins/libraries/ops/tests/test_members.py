"""What an estimator returns is refused by its name if it is no array."""

from typing import Any

import numpy as np
import pytest

from whet.data.batch import Batch, from_sequences
from whet.errors import PluginError
from whet_ops.members import by_conversation


@pytest.mark.parametrize("found", [(np.zeros(2), 1), [[0.0], [0.0, 1.0]]])
def test_parts_that_make_no_array_are_refused_with_their_estimator(found: Any) -> None:
    def centred(batch: Batch) -> Any:
        return found

    batch = from_sequences([{"tokens": [1, 2], "loss_mask": [False, True]}] * 2, prompt_lengths=[1, 1])
    kind = type(found).__name__
    with pytest.raises(PluginError, match=f"advantages of centred are a {kind} of parts that make no array; wanted a"):
        by_conversation(centred, batch)
