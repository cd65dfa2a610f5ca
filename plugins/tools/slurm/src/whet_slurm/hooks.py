"""What this plugin does: it tells a run when its job ends."""

import os
from collections.abc import Generator
from typing import TYPE_CHECKING

from whet import hookimpl

if TYPE_CHECKING:
    from whet.interfaces.algorithm import Parts


@hookimpl(wrapper=True)
def whet_run(parts: "Parts") -> Generator[None, object, object]:
    """Run the algorithm until the end of the job at the latest."""
    from whet_slurm.job import end_of_job

    if (end := end_of_job(os.environ)) is not None:
        parts.steps.end_by(end, f"Slurm ends job {os.environ.get('SLURM_JOB_ID', '')}".rstrip())
    return (yield)
