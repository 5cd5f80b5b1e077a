"""What must hold for a stock libnccl under AMem. Every check takes what was observed and returns complaints, one a line."""

import collections
import dataclasses
import os

import known_names

# Fewer driver functions than this are not even what the CUDA runtime of the oldest NCCL looks up; then a check would be passed by
# an NCCL that gave up before it asked.
FEWEST_LOOK_UPS = 300
NO_BOUND = 2**31 - 1  # the version before which a replacement serves, where it serves all
MEMORY_CALLS = ("cuMemAlloc", "cuMemFree", "cuMemcpyAsync", "cuLaunchKernel", "cuIpcGetMemHandle")


@dataclasses.dataclass
class Observed:
    """What one run of one libnccl left. Look-ups are in their order, and only those of that libnccl."""

    names: set = dataclasses.field(default_factory=set)  # that stand in the file
    imported: set = dataclasses.field(default_factory=set)
    look_ups: list = dataclasses.field(default_factory=list)  # (name, CUDA version, calling library), as the driver saw them
    direct: list = dataclasses.field(default_factory=list)  # (name, calling library), of dlsym and dlvsym, as the loader saw them
    bound: list = dataclasses.field(default_factory=list)  # (name, CUDA version, replaced), from AMem's journal


def is_amem(library):
    return os.path.basename(library).startswith("libamem_nccl")


def of_nccl(direct):
    """The direct look-ups that NCCL made, whoever passed them on; the stand-in driver looks up its own functions as well."""
    return [(name, library) for name, library in direct if is_amem(library) or "nccl" in os.path.basename(library)]


def belongs_in_the_journal(name):
    return known_names.about_memory(name) or known_names.decided(name) == "replaced"


def every_look_up_came_to_amem(seen):
    complaints = [f"{name} is imported, and not looked up, so AMem cannot see it called" for name in sorted(seen.imported)]
    complaints += [f"{name} of CUDA {version} was looked up past AMem by {library}" for name, version, library in seen.look_ups
                   if not is_amem(library)]
    complaints += [f"dlsym was asked for {name} past AMem by {library}" for name, library in of_nccl(seen.direct)
                   if not is_amem(library)]
    if len(seen.look_ups) < FEWEST_LOOK_UPS:
        complaints.append(f"only {len(seen.look_ups)} driver functions were looked up, which proves nothing")
    asked = {name for name, _, _ in seen.look_ups}
    complaints += [f"{name} was never looked up, which proves nothing" for name in MEMORY_CALLS if name not in asked]
    return complaints


def the_journal_has_what_the_driver_was_asked(seen):
    asked = collections.Counter((name, version) for name, version, _ in seen.look_ups
                                if belongs_in_the_journal(name))
    bound = collections.Counter((name, version) for name, version, _ in seen.bound)
    complaints = [f"the driver was asked for {name} of CUDA {version} {count} times more than the journal says"
                  for (name, version), count in sorted((asked - bound).items())]
    complaints += [f"the journal has {name} of CUDA {version} {count} times more than the driver was asked"
                   for (name, version), count in sorted((bound - asked).items())]
    return complaints


def no_name_is_unknown(seen):
    names = seen.names | {name for name, _, _ in seen.look_ups} | {name for name, _ in of_nccl(seen.direct)}
    unknown = sorted({known_names.base(name) for name in names
                      if known_names.about_memory(name) and known_names.decided(name) is None})
    return [f"{name} is about memory, and tests/wheels/known_names.py does not say what AMem does with it" for name in unknown]


def what_is_said_to_be_replaced_is(seen):
    complaints = set()
    for name, version, replaced in seen.bound:
        if replaced != (known_names.decided(name) == "replaced"):
            got, said = ("AMem's", "the driver's") if replaced else ("the driver's", "AMem's")
            complaints.add(f"for {name} of CUDA {version} NCCL got {got} function, where known_names.py says {said}")
    return sorted(complaints)


def the_table_says_what_the_library_does(replacements):
    """`replacements`: (name, CUDA version from which, and before which AMem has a function for it), as replaced_names prints them."""
    real = {known_names.base(name) for name, _, _ in replacements}
    complaints = [f"{name} is replaced by AMem, and known_names.py does not say so" for name in sorted(real - known_names.REPLACED)]
    complaints += [f"{name} is not replaced by AMem, and known_names.py says it is" for name in sorted(known_names.REPLACED - real)]
    for name in sorted(real):
        until = max(before for other, _, before in replacements if known_names.base(other) == name)
        if until != NO_BOUND:
            complaints.append(f"{name} is replaced before CUDA {until} only, and an NCCL that asks later gets the driver's")
    complaints += [f"{name} is twice in known_names.py" for name in sorted(known_names.REPLACED & set(known_names.WHY_IT_PASSES))]
    return complaints


def complaints(seen):
    return (every_look_up_came_to_amem(seen) + the_journal_has_what_the_driver_was_asked(seen) + no_name_is_unknown(seen)
            + what_is_said_to_be_replaced_is(seen))


def counted(seen):
    """(look-ups that came to AMem, all look-ups)"""
    every = [library for _, _, library in seen.look_ups] + [library for _, library in of_nccl(seen.direct)]
    return sum(map(is_amem, every)), len(every)
