"""Prints, as JSON, what varies the key of a launch that it must not: run as a process of its own,
as one in interpreter mode has no keys. See test_specialisation.py."""

import json
import re
from dataclasses import replace

import triton
import triton.language as tl
from workbench.kernels import catalogue
from workbench.kernels.aot import TARGETS
from workbench.kernels.device import specialisation
from workbench.kernels.ops import Blanks, Sizes
from workbench.kernels.peers import Peers

TARGET = TARGETS["sm_100a"]
SIZES = Sizes()
RANKS, ENTRIES = (0, 1, 2, 15, 16, 31), (0, 1, 15, 16)
OFFSETS = (0, (1 << 31) - 128, (1 << 33) + 128)
ADDRESSES = (1, 128, 0x7F00_0000_0248)
OF_CONTEXT = {"rank": RANKS, "entry": ENTRIES, "slot_at": OFFSETS, "scratch_at": OFFSETS}
PLACES = re.compile(r"\w+_at|\w*offset|slot_from|slot_bytes|scratch")
"""Arguments that say where something lies, whatever type the kernel gives them."""


def calls(arguments):
    """The arguments of an op on other ranks, in other entries, at other places of the arena."""
    yield arguments
    for name, values in OF_CONTEXT.items():
        if name in arguments:
            yield from ({**arguments, name: value} for value in values)
    for offset in OFFSETS:
        moved = {k: replace(v, offset=offset) for k, v in arguments.items() if isinstance(v, Peers)}
        yield {**arguments, **moved}


def elsewhere(launch):
    """The launch with all that it is given lying elsewhere."""
    yield launch
    places = [name for name in launch.args if PLACES.fullmatch(name)]
    for shift in range(len(ADDRESSES)):
        at = {name: ADDRESSES[(i + shift) % len(ADDRESSES)] for i, name in enumerate(places)}
        yield replace(launch, args={**launch.args, **at})


def variants():
    """(op, position) -> launches that differ in what a rank, an entry or a call has of its own."""
    blanks, found = Blanks(SIZES), {}
    for name, op in catalogue.OPS.items():
        for variant, arguments in op.examples(blanks).items():
            for given in calls(arguments):
                for i, launch in enumerate(op.entry(TARGET, **given)):
                    found.setdefault(f"{name}, {variant}, {i}", []).extend(elsewhere(launch))
    return found


def key(launch, kernel=None):
    return specialisation(replace(launch, kernel=kernel or launch.kernel), TARGET.arch)


def mutants(kernel):
    """The kernel with one of its fixed arguments left to Triton, as it is or without its type.
    Those of 32 bits never need more, so that their type alone changes nothing."""
    fixed, types = list(kernel.do_not_specialize), kernel.fn.__annotations__
    for name in fixed:
        yield name, triton.jit(do_not_specialize=[n for n in fixed if n != name])(kernel.fn)
        typed = types[name]
        if typed == tl.int64:
            del types[name]
            yield f"{name} without its type", triton.jit(do_not_specialize=fixed)(kernel.fn)
            types[name] = typed


def main():
    found, killed = variants(), {}
    for first, *others in found.values():
        for name, mutant in mutants(first.kernel):
            label = f"{first.name}: {name}"
            if not killed.get(label):
                own = key(first, mutant)
                killed[label] = any(key(other, mutant) != own for other in others)
    print(
        json.dumps(
            {
                "launches": {label: len(launches) for label, launches in found.items()},
                "keys": {label: len(set(map(key, launches))) for label, launches in found.items()},
                "mutants": killed,
            }
        )
    )


if __name__ == "__main__":
    main()
