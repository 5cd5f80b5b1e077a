"""The entry point `torch.backends`: with AMEM_ENABLE=1 set, `import torch` attaches AMem, also in workers that a framework forks or
spawns with an LD_PRELOAD of its own. Without the variable it does nothing. It never fails the import.

A module beside the package, because PyTorch imports it in every process, and importing the package attaches."""

import os
import sys
import warnings

attached_amem = False  # whether the package was imported from here


def attach():
    global attached_amem
    if os.environ.get("AMEM_ENABLE") != "1":
        return
    attached_amem = "amem" not in sys.modules
    try:
        import amem  # noqa: F401  (importing attaches)
    except Exception as error:  # pylint: disable=broad-except
        warnings.warn("AMem could not be attached, and the program runs without it: %s" % error, RuntimeWarning, stacklevel=2)
