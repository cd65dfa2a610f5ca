"""The import path of earlier versions, for one version."""

import warnings

from whet_testing.role_context import make_context as make_site

__all__ = ["make_site"]

warnings.warn("whet_testing.site has moved to whet_testing.role_context", DeprecationWarning, stacklevel=2)
