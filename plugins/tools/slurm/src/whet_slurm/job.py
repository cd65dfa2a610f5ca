"""When a job ends, as Slurm reports it.

SLURM_JOB_END_TIME       seconds since the epoch; set by `srun` and `sbatch` of recent versions of Slurm
scontrol show job ID     ... EndTime=2026-11-25T14:00:00 ... in local time; `Unknown` if the job has no time limit
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import datetime

_END = re.compile(r"\bEndTime=(\S+)")
SECONDS = 20.0
"""How long `scontrol` may take."""


def end_of_job(environment: Mapping[str, str]) -> float | None:
    """Return when the job of this process ends, in seconds since the epoch. None: there is no job, or no limit.

    A stated end that is past is of another job: a shell that outlived its job still has the variable.
    """
    stated = environment.get("SLURM_JOB_END_TIME", "")
    if stated.isdecimal() and int(stated):
        if int(stated) > time.time():
            return float(stated)
        print(f"SLURM_JOB_END_TIME is {stated}, which is past, so it is of another job", file=sys.stderr)
    job = environment.get("SLURM_JOB_ID", "")
    program = shutil.which("scontrol", path=environment.get("PATH"))
    if not job.isdecimal() or program is None:
        return None
    # The user's own SLURM_TIME_FORMAT would change what is printed.
    variables = {**environment, "SLURM_TIME_FORMAT": "standard"}
    try:
        shown = subprocess.run(
            [program, "show", "job", job], env=variables, capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        print(f"when Slurm ends job {job} is unknown, so the run does not end before: {error}", file=sys.stderr)
        return None
    end = end_shown(shown, job)
    if end is not None and end <= time.time():
        when = datetime.fromtimestamp(end).isoformat()
        print(f"scontrol: job {job} ended {when}, which is past, so the end is not used", file=sys.stderr)
        return None
    return end


def end_shown(text: str, job: str) -> float | None:
    """Return the end of a job in the output of `scontrol show job`, in seconds since the epoch. None: it has none.

    For the first task of an array, whose number is that of the array, all tasks are shown.
    """
    shown = next((one for one in re.split(r"\n\s*\n", text) if re.search(rf"\bJobId={job}\b", one)), "")
    found = _END.search(shown)
    try:
        return datetime.fromisoformat(found[1]).timestamp() if found else None
    except ValueError:  # "Unknown"
        return None
