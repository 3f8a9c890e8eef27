"""One rank of a test under torchrun: `ranks.py JOB OUT ...` runs a job of this module.

Each job writes what it found to OUT/<rank>.json; the test reads and judges it.
"""

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layer_cases import Workload, errors, experts, random_config, run, sliced, workload

from workbench.moe.config import MoEConfig
from workbench.moe.context import create_context
from workbench.moe.groups.collective import CollectiveGroup
from workbench.moe.groups.shared import SharedGroup
from workbench.moe.layer import MoELayer
from workbench.routing import route

SMALL = MoEConfig(T=16, D=32, F=16, E=8, K=2, ep=1, scratch_factor=8)


def values(first: int, last: int) -> Any:
    """Errors of the cases `first` to `last` for both pipelines and both dtypes, on rank 0."""
    group, found = SharedGroup(timeout_s=60), []
    collective = CollectiveGroup(timeout_s=60)
    ep, rank = group.size, group.rank
    for seed in range(first, last):
        config, empty = random_config(seed, ep, "bfloat16")
        work = workload(config, seed, empty_rank=empty)
        exact = work.exact() if rank == 0 else None
        for pipeline in ("standard", "alltoall"):
            for dtype in ("bfloat16", "float32"):
                mine = _cast(work, replace(config, pipeline=pipeline, dtype=dtype)).of_rank(rank)
                peers = collective if pipeline == "alltoall" and seed % 2 else group
                with create_context(mine.config, peers) as context:
                    parts = group.gather_objects([t.float().numpy() for t in run(mine, context)])
                    peaks = group.gather_objects(context.peaks()[rank])
                if exact is not None:
                    whole = tuple(
                        torch.from_numpy(np.concatenate(p)) for p in zip(*parts, strict=True)
                    )
                    found.append(
                        {
                            "seed": seed,
                            "pipeline": pipeline,
                            "dtype": dtype,
                            "rows": [p["rows"] for p in peaks],
                            "recomputed": sum(p["recomputed"] for p in peaks),
                            "expert_rows": np.bincount(
                                work.ids.ravel(), minlength=config.E
                            ).tolist(),
                            "sizes": [config.T, config.D, config.F, config.E, config.K],
                            "errors": errors(whole, exact),
                        }
                    )
    return found


def _cast(work: Workload, config: MoEConfig) -> Workload:
    dtype = getattr(torch, config.dtype)
    return Workload(
        config,
        work.x.to(dtype),
        work.ids,
        work.scores,
        work.w13.to(dtype),
        work.w2.to(dtype),
        work.dy.to(dtype),
    )


def bad_inputs() -> Any:
    """Each bad input on the last rank alone: what every rank raises, and that it works after."""
    group = SharedGroup(timeout_s=20)
    last = group.rank == group.size - 1
    config = replace(SMALL, ep=group.size)
    whole = workload(config, 0)
    work = whole.of_rank(group.rank)
    found: dict[str, Any] = {}
    for pipeline in ("standard", "alltoall"):
        with create_context(replace(config, pipeline=pipeline), group) as context:
            for name, change in BAD.items():
                given = [work.x, work.ids, work.scores, work.w13, work.w2]
                if last:
                    place, spoil = change
                    given[place] = spoil(given[place].clone())
                began = time.monotonic()
                try:
                    experts(*given, context)
                    found[f"{pipeline} {name}"] = "nothing"
                except ValueError as error:
                    found[f"{pipeline} {name}"] = f"{type(error).__name__}: {error}"
                found["seconds"] = max(found.get("seconds", 0), time.monotonic() - began)
                again = largest_error(whole, run(work, context), group.rank)
                found[f"{pipeline} after {name}"] = again
    return found


def no_tokens() -> Any:
    """What are no tokens on the last rank alone, given to a layer: what every rank raises."""
    group = SharedGroup(timeout_s=20)
    found: dict[str, Any] = {}
    with create_context(replace(SMALL, ep=group.size), group) as context:
        layer = MoELayer(context)
        x = torch.randn(SMALL.T, SMALL.D).bfloat16()
        for name, wrong in NO_TOKENS.items():
            last = group.rank == group.size - 1
            ids, scores = layer.route(x) if name == "scores" and last else (None, None)
            began = time.monotonic()
            try:
                layer(wrong if last else x, ids, None if scores is None else scores[0, 0])
                found[name] = "nothing"
            except ValueError as error:
                found[name] = f"{type(error).__name__}: {error}"
            found["seconds"] = max(found.get("seconds", 0), time.monotonic() - began)
            found[f"after {name}"] = bool(layer(x).detach().isfinite().all())
    return found


NO_TOKENS = {
    "no dimension": torch.tensor(1.0),
    "empty": torch.zeros(0),
    "no rows": torch.zeros(0, SMALL.D),
    "no tensor": None,
    "elsewhere": torch.zeros(SMALL.T, SMALL.D, dtype=torch.bfloat16, device="meta"),
    "scores": torch.zeros(SMALL.T, SMALL.D, dtype=torch.bfloat16),
}


def bad_inputs_unseen() -> Any:
    """A bad input on the last rank in a step that is not validated: what `check` then raises."""
    group = SharedGroup(timeout_s=20)
    config = replace(SMALL, ep=group.size, validate="never")
    whole = workload(config, 0)
    work = whole.of_rank(group.rank)
    found: dict[str, Any] = {}
    for pipeline in ("standard", "alltoall"):
        with create_context(replace(config, pipeline=pipeline), group) as context:
            for name, (place, spoil) in BAD.items():
                x, scores, w13, w2 = work.leaves()
                given: list[Any] = [x, work.ids, scores, w13, w2]
                if group.rank == group.size - 1:
                    spoiled = spoil(given[place].detach().clone())
                    floats = spoiled is not None and spoiled.is_floating_point()
                    given[place] = spoiled.requires_grad_() if floats else spoiled
                y = experts(*given, context)
                y.backward(work.dy)
                grads = [t.grad for t in given if t is not None and t.is_floating_point()]
                found[f"{pipeline} NaN {name}"] = all(bool(t.isnan().all()) for t in (y, *grads))
                try:
                    context.check()
                    found[f"{pipeline} {name}"] = "nothing"
                except ValueError as error:
                    found[f"{pipeline} {name}"] = f"{type(error).__name__}: {error}"
                again = largest_error(whole, run(work, context), group.rank)
                found[f"{pipeline} after {name}"] = again
    return found


def _set(value: float, *place: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return spoil


BAD: dict[str, tuple[int, Callable[[torch.Tensor], Any]]] = {
    "T": (0, lambda x: x[:-1]),
    "T ids": (1, lambda ids: ids[:-1]),
    "dtype": (0, lambda x: x.double()),
    "strides": (0, lambda x: x.t().contiguous().t()),
    "no tensor": (0, lambda x: None),
    "weights": (3, lambda w: w[:, 1:]),
    "id beyond": (1, _set(8, 3, 1)),
    "id negative": (1, _set(-1, 0, 0)),
    "id repeated": (1, lambda ids: ids[:, :1].repeat(1, 2)),
    "score nan": (2, _set(float("nan"), 5, 1)),
    "score inf": (2, _set(float("inf"), 5, 1)),
}


def largest_error(whole: Workload, found: tuple[torch.Tensor, ...], rank: int) -> float:
    """Largest relative error of a rank's output and gradients."""
    return max(errors(found, sliced(whole.exact(), rank, whole.config)).values())


def overflow() -> Any:
    """All rows on rank 0 with room for half of them, with each `validate`; then usable again."""
    group = SharedGroup(timeout_s=20)
    config = replace(SMALL, ep=group.size, scratch_factor=group.size / 2)
    ids = np.tile([0, 1], (group.size * 16, 1))
    hot = workload(config, 0, ids=ids).of_rank(group.rank)
    balanced = route(T=16, K=2, E=8, ep=group.size, factor=1.0).ids
    whole = workload(config, 0, ids=balanced)
    good = whole.of_rank(group.rank)
    found = {}
    for validate in ("always", "first", "never"):
        with create_context(replace(config, validate=validate), group) as context:
            if validate == "first":
                run(good, context)
            x, scores, w13, w2 = hot.leaves()
            try:
                y = experts(x, hot.ids, scores, w13, w2, context)
                y.backward(hot.dy)
                grads = (y, x.grad, scores.grad, w13.grad, w2.grad)
                found[f"{validate} all NaN"] = all(bool(t.isnan().all()) for t in grads)
                context.check()
                found[validate] = "nothing"
            except RuntimeError as error:
                found[validate] = f"{type(error).__name__}: {error}"
            context.check()
            found[f"{validate} after"] = largest_error(whole, run(good, context), group.rank)
    return found


def mismatch(pipeline: str) -> Any:
    """Rank 0 goes forward while the others go backward; then ranks disagree about gradients."""
    group = SharedGroup(timeout_s=20)
    config = replace(SMALL, ep=group.size, pipeline=pipeline, layers=2)
    whole = workload(config, 0)
    work = whole.of_rank(group.rank)
    found: dict[str, Any] = {}
    with create_context(config, group) as context:
        x, scores, w13, w2 = work.leaves()
        y = experts(x, work.ids, scores, w13, w2, context)
        try:
            if group.rank:
                y.backward(work.dy)
            else:
                experts(x, work.ids, scores, w13, w2, context)
            found["calls"] = "nothing"
        except ValueError as error:
            found["calls"] = str(error)
        del y
        try:
            with torch.set_grad_enabled(group.rank > 0):
                experts(x, work.ids, scores, w13, w2, context)
            found["gradients"] = "nothing"
        except ValueError as error:
            found["gradients"] = str(error)
        found["after"] = largest_error(whole, run(work, context), group.rank)
    return found


def dies(how: str, where: str) -> Any:
    """The last rank ends, raises or is late at a phase of the backward; what the others see."""
    group = SharedGroup(timeout_s=4)
    config = replace(SMALL, ep=group.size, E=12)
    work = workload(config, 0).of_rank(group.rank)
    context = create_context(config, group)
    run(work, context)
    if group.rank == group.size - 1:
        launch = context.executor.launch

        def fail(op: str, rank: int, arguments: dict[str, Any]) -> None:
            if op == where:
                if how == "kill":
                    os.kill(os.getpid(), 9)
                elif how == "raise":
                    raise MemoryError("no more")
                time.sleep(float(how))
            launch(op, rank, arguments)

        context.executor.launch = fail  # type: ignore[method-assign]
    began = time.monotonic()
    found: dict[str, Any] = {}
    try:
        x, scores, w13, w2 = work.leaves()
        experts(x, work.ids, scores, w13, w2, context).backward(work.dy)
        found["raised"] = "nothing"
    except (RuntimeError, MemoryError) as error:
        found["raised"] = f"{type(error).__name__}: {error}"
    found["seconds"] = time.monotonic() - began
    try:
        run(work, context)
        found["after"] = "nothing"
    except RuntimeError as error:
        found["after"] = f"{type(error).__name__}: {error}"
    context.close()
    group.close()
    found["maps"] = segments()
    return found


def segments() -> list[str]:
    """Shared memory that this process still holds."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    files = [
        os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.is_symlink() and f.exists()
    ]
    return [line for line in (*maps, *files) if "memfd:moe" in line]


def closes() -> Any:
    """Memory is held while a context lives and not after it."""
    group = SharedGroup(timeout_s=20)
    config = replace(SMALL, ep=group.size)
    with create_context(config, group) as context:
        inside = len(segments())
        measured = context.measured_bytes()
        planned = context.plan.arena_bytes
    left = len(segments())
    context = create_context(config, group)
    group.close()
    try:
        run(workload(config, 0).of_rank(group.rank), context, poison=False)
        after = "nothing"
    except RuntimeError as error:
        after = f"{type(error).__name__}: {error}"
    return {
        "inside": inside,
        "left": left,
        "closed": segments(),
        "bytes": [measured, planned],
        "after": after,
    }


def no_memory() -> Any:
    """The last rank cannot map its arena; then it can."""
    found: dict[str, Any] = {}
    for kind, group in {
        "shared": SharedGroup(timeout_s=20),
        "collective": CollectiveGroup(timeout_s=20),
    }.items():
        config = replace(SMALL, ep=group.size, pipeline="alltoall")
        real, began = mmap.mmap, time.monotonic()
        if group.rank == group.size - 1:
            mmap.mmap = _refuse  # type: ignore[misc, assignment]
        try:
            create_context(config, group)
            found[kind] = "nothing"
        except MemoryError as error:
            found[kind] = str(error)
        finally:
            mmap.mmap = real  # type: ignore[misc]
        found[f"{kind} seconds"] = time.monotonic() - began
        whole = workload(config, 0)
        with create_context(config, group) as context:
            mine = run(whole.of_rank(group.rank), context)
        found[f"{kind} after"] = largest_error(whole, mine, group.rank)
        group.close()
    return found


def _refuse(*_: Any, **__: Any) -> Any:
    raise OSError(12, "Cannot allocate memory")


def disagrees() -> Any:
    """Ranks that ask for different contexts."""
    group = SharedGroup(timeout_s=20)
    config = replace(SMALL, ep=group.size, T=16 + group.rank)
    try:
        create_context(config, group)
    except ValueError as error:
        return str(error)
    return "nothing"


def sound() -> Any:
    """The jobs after which every rank is well, in one start."""
    return {
        "bad": bad_inputs(),
        "overflow": overflow(),
        "mismatch standard": mismatch("standard"),
        "mismatch alltoall": mismatch("alltoall"),
        "closes": closes(),
        "disagrees": disagrees(),
        "no memory": no_memory(),
        "unseen": bad_inputs_unseen(),
        "no tokens": no_tokens(),
    }


JOBS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (values, sound, dies)}


def main(job: str, out: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = JOBS[job](*(int(a) if a.isdigit() and job == "values" else a for a in arguments))
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(found))
    if job == "dies":
        os._exit(0)  # a rank died: nothing to take leave of
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
