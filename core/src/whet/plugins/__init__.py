"""The installed plugins: their hooks, what they offer, and which distribution offers a name."""

from whet.moved import leading_on

__getattr__ = leading_on(__name__, {"load_plugins": "whet.plugins.registry"})
