"""`workbench doctor`: whether the GPUs of this host can run the layer."""

import json
from typing import Annotated

import typer

from workbench.errors import check_whole


def doctor_command(
    device: Annotated[str, typer.Option(help="What ranks run on; cuda is looked at.")] = "cuda",
    ranks: Annotated[int, typer.Option(help="Ranks to be run on this host.")] = 1,
    arena_gib: Annotated[float, typer.Option(help="GiB of a rank's arena.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line per check.")] = False,
) -> None:
    """Look at driver, versions, GPUs, peers, fabric, symmetric memory and clocks of this host.

    A line per check: its state, what was found, what to do. Exit code 0 if all is well, 1 if
    something failed, 3 if no GPU can be used.
    """
    from dataclasses import asdict

    from workbench.bench.doctor import Need, checks, elsewhere, exit_code
    from workbench.bench.probe import look_deeply

    check_whole("ranks", ranks)
    need = Need(ranks=ranks, arena_bytes=int(arena_gib * 2**30))
    found = checks(look_deeply(), need) if device == "cuda" else elsewhere(device)
    for check in found:
        print(json.dumps(asdict(check)) if as_json else check.line(), flush=True)
    raise typer.Exit(exit_code(found))
