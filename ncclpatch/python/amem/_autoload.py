"""The entry point `torch.backends`: with AMEM_ENABLE=1 set, `import torch` attaches AMem, also in workers that a framework forks or
spawns with an LD_PRELOAD of its own. Without the variable it does nothing. It never fails the import."""

import os
import warnings


def attach():
    if os.environ.get("AMEM_ENABLE") != "1":
        return
    try:
        import amem  # noqa: F401  (importing attaches)
    except Exception as error:  # pylint: disable=broad-except
        warnings.warn("AMem could not be attached, and the program runs without it: %s" % error, RuntimeWarning, stacklevel=2)
