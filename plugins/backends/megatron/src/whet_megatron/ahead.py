"""Imports Megatron Core, which takes seconds, while other things are prepared. Nothing here is used by name.

Importing it starts no thread and opens no device. If it cannot be imported, `whet_megatron.layers` says why.
"""

from importlib import import_module

from whet_megatron.cpu_shim import MODULES

for module in MODULES:
    import_module(module)
