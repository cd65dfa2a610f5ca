"""Build the parts of a run from its plan, and run it.

    load YAML -> structure -> problems -> plan -> slices -> parts -> run -> close in reverse order
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from attrs import frozen

import whet
from whet import checkpoint
from whet.config.build import build_selection, to_spec
from whet.config.load import Loaded, load_config
from whet.config.structure import unstructure
from whet.errors import CheckpointError, ConfigError
from whet.model import ModelInfo, fingerprint, locate, read_model
from whet.plan import Machine, Plan, gather_facts, make_plan
from whet.run_folder import RunFolder
from whet.spans import Spans

if TYPE_CHECKING:
    from whet.config.sections import Config
