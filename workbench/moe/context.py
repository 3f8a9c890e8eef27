"""A group's context: its arena, its layers' entries, and the runs of a pipeline through it.

`create_context` is the one collective that allocates. What it allocated goes with `close()`, or
with the `with` block; nothing that a peer does can leave memory behind.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.errors import InputError
from workbench.kernels.words import Code, Decide, Head, Peak
from workbench.moe.arena import OursPlan, plan_ours
from workbench.moe.config import MoEConfig
from workbench.moe.executor_library import LibraryExecutor
from workbench.moe.executor_torch import Dry, Logged, TorchExecutor
from workbench.moe.executor_triton import TritonExecutor
from workbench.moe.failures import ClosedError, failure
from workbench.moe.groups.peers_group import PeerGroup
from workbench.moe.groups.virtual import VirtualGroup
from workbench.moe.pages import Lender
from workbench.moe.pipelines.parts import AllToAll, Barrier, Gather, Part, Phase, load_pipeline
from workbench.moe.step import Executor, RankMemory, Step, splits
from workbench.moe.weights import Weights
from workbench.runtime import to_host
from workbench.systems import SYSTEMS

FORWARD, BACKWARD = 0, 1


class Context:
    """Made by `create_context`. Not safe to use from two threads at a time.

    `timer`, if set, is called as a call starts, with "", and as each part has been queued, with its
    name. `log`, if set to a list, receives every launch.
    """

    def __init__(self, config: MoEConfig, group: PeerGroup, plan: OursPlan) -> None:
        self.config, self.group, self.plan = config, group, plan
        with torch.inference_mode(False):
            arenas_PB, bases_P = group.allocate(plan.arena_bytes)
        self._memory: dict[int, RankMemory] = {
            rank: RankMemory(plan, arenas_PB, bases_P, rank if bases_P.shape[0] > 1 else 0)
            for rank in group.hosted
        }
        self.device = arenas_PB.device
        self.executor = make_executor(config, self.device)
        self.lender = Lender()
        """Lends the weights' gradients."""
        self.timer: Callable[[str], None] | None = None
        self._closed: str | None = None
        self._held: dict[int, int] = {}
        self._loans = 0
        self._dropped: dict[int, int] = {}
        self._parted: dict[int, int] = {}
        self._calls = 0
        self._validated: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: a copied layer meets the same peers in the same memory."""
        return self

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            "a context and a layer on it must not be pickled: the arena is this process's own;"
            " save layer.state_dict() and load it into a layer of another context"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Frees the arena; local, and fine to call twice. The group stays with its maker."""
        if self._closed is None:
            self._free("it was closed")

    def _free(self, reason: str) -> None:
        self._closed = reason
        for memory in self._memory.values():
            memory.release()
        self._memory.clear()
        self.lender.clear()

    @property
    def log(self) -> list[Logged] | None:
        return self.executor.log

    @log.setter
    def log(self, log: list[Logged] | None) -> None:
        self.executor.log = log

    def memory(self, rank: int) -> RankMemory:
        """The views of a hosted rank."""
        if self._closed is not None:
            raise ClosedError(f"context is closed: {self._closed}")
        return self._memory[rank]

    def measured_bytes(self) -> int:
        """Bytes of a rank's arena as they lie in memory."""
        memory = self.memory(self.group.hosted[0])
        return memory.arenas_PB.untyped_storage().nbytes() // memory.arenas_PB.shape[0]

    def peaks(self) -> dict[int, dict[str, int]]:
        """For each hosted rank, its `Peak` words by lower-case name; a host read."""
        return {
            rank: {p.name.lower(): words[p] for p in Peak}
            for rank in self.group.hosted
            for words in [to_host(self.memory(rank).own("peaks")).tolist()]
        }

    def counts(self, entry: int) -> Tensor:
        """Rows that each rank sent to each expert in the last forward of `entry`, int64 [P, E]."""
        return self.memory(self.group.hosted[0]).own(f"counts_PE.{entry}").clone()

    def check(self) -> None:
        """Raises what ranks agreed was wrong since the last check; the same on every rank. Waits
        for the device: PeerError where it waits for a peer that does not come."""
        for rank in self.group.hosted:
            memory = self.memory(rank)
            self.group.settle("check")
            words = to_host(memory.own("first_error")).tolist()
            if words[Decide.CODE] != Code.OK:
                said = to_host(memory.own("error_text")).tolist()
                text = bytes(said).rstrip(b"\0").decode()
                for other in self.group.hosted:
                    self.memory(other).own("first_error").zero_()
                raise failure(words, text, self.config)

    def take_entry(self, saves: bool) -> int | None:
        """A free layer entry for a forward; None if every one awaits its backward."""
        self._take_back(self._dropped)
        if not saves:
            return self.plan.entries - 1
        if len(self._held) == self.config.layers:
            self._take_back(self._parted)
        free = [i for i in range(self.config.layers) if i not in self._held]
        if not free:
            return None
        self._loans += 1
        self._held[free[0]] = self._loans
        return free[0]

    def _take_back(self, loans: dict[int, int]) -> None:
        while loans:
            entry, loan = loans.popitem()
            if self._held.get(entry) == loan:
                self.free_entry(entry)

    def loan(self, entry: int) -> int:
        """The number of the forward that holds the entry, from 1; 0 if none does."""
        return self._held.get(entry, 0)

    def free_entry(self, entry: int) -> None:
        self._held.pop(entry, None)
        if self._closed is None:
            for rank in self.group.hosted:
                self.memory(rank).own("decisions")[entry, Decide.END].zero_()

    def drop_entry(self, entry: int, loan: int) -> None:
        """What held the entry went away without a backward; freed at the next forward."""
        if self.loan(entry) == loan:
            self._dropped[entry] = loan

    def part_entry(self, entry: int, loan: int) -> None:
        """The graph that holds the entry lost its saved tensors; freed when none else is free."""
        if self.loan(entry) == loan:
            self._parted[entry] = loan

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Peers wait for what is done here: if it fails they know now, not when their time is up,
        and the context is closed."""
        try:
            yield
        except BaseException as error:
            self.group.abort(f"{type(error).__name__}: {error}")
            self._free(f"a call failed: {type(error).__name__}: {error}")
            raise

    def run(self, kind: int, steps: Sequence[Step], problem: str | None) -> None:
        """One call on the hosted ranks. `problem`: what the host found wrong, which every rank
        then raises; ops are no-ops in such a call, but it meets every barrier."""
        self._calls += 1
        for step in steps:
            self._announce(step, kind, problem)
        with self.expected():
            tell = self.timer or (lambda part: None)
            tell("")
            for part in parts_of(self.config, kind):
                self._part(part, steps)
                tell(part.name if isinstance(part, Phase | Barrier) else type(part).__name__)
        if self.config.validate == "always" or (
            self.config.validate == "first" and kind not in self._validated
        ):
            self._validated.add(kind)
            self.check()

    def _announce(self, step: Step, kind: int, problem: str | None) -> None:
        head = step.own("head").zero_()
        # Fills: an assigned number is a copy from the host, which a graph cannot hold.
        for word, value in ((Head.KIND, kind), (Head.ENTRY, step.entry), (Head.CALL, self._calls)):
            head[word].fill_(value)
        if problem is not None:
            head[Head.CODE].fill_(int(Code.HOST))
            text = problem.encode()[: step.own("text").shape[0]]
            said = torch.tensor(list(text), dtype=torch.uint8).to(self.device)
            step.own("text").zero_()[: len(text)].copy_(said)

    def _part(self, part: Any, steps: Sequence[Step]) -> None:
        if isinstance(part, Phase):
            with torch.no_grad():
                for step in steps:
                    part.run(step)
        elif isinstance(part, Barrier):
            self.group.barrier(part.name)
        elif isinstance(part, Gather):
            for own, everyone in part.pairs:
                if own == "head" or self._in_step(steps[0]):
                    self.group.all_gather([(s.own(own), s.own(everyone)) for s in steps])
        elif isinstance(part, AllToAll) and self._in_step(steps[0]):
            cuts = [splits(step, part.back) for step in steps]
            if isinstance(self.executor, LibraryExecutor):
                self.executor.words = {s.rank: s.words for s in steps if s.words is not None}
            self.group.all_to_all(
                [
                    (s.own(part.send), out, s.own(part.receive), into)
                    for s, (out, into) in zip(steps, cuts, strict=True)
                ]
            )

    def _in_step(self, step: Step) -> bool:
        """Whether all ranks are in the same call, by the heads just gathered; else their further
        collectives would not match."""
        calls_PH = to_host(step.own("heads_PH"))[:, Head.KIND : Head.CALL + 1]
        return bool((calls_PH == calls_PH[0]).all())


def make_executor(config: MoEConfig, device: torch.device) -> TorchExecutor | TritonExecutor:
    """What runs the ops of a context. On a GPU, a baseline without peers' memory takes torch's own
    grouped products, as its users would. Raises InputError where kernels cannot run."""
    if config.executor == "torch":
        return TorchExecutor()
    library = device.type != "cpu" and not SYSTEMS[config.pipeline].peer_memory
    return (LibraryExecutor if library else TritonExecutor)(device)


def parts_of(config: MoEConfig, kind: int) -> tuple[Part, ...]:
    """The forward or backward of a config's pipeline."""
    pipeline = load_pipeline(config.pipeline)
    return pipeline.forward if kind == FORWARD else pipeline.backward


def create_context(config: MoEConfig, group: PeerGroup) -> Context:
    """The context of a group for layers of one shape. Collective: every rank calls it alike.

    Raises InputError where config and group do not fit, or ranks gave different configs, and
    MemoryError where the arena cannot be had; each on every rank.
    """
    if config.ep != group.size:
        problem: str | None = f"ep={config.ep} must be the size of the group, {group.size}"
    elif SYSTEMS[config.pipeline].peer_memory and not group.sees_peers:
        problem = (
            f"pipeline={config.pipeline!r} must have a group that sees its peers' memory, which"
            f" group={group.kind!r} does not; use 'alltoall'"
        )
    elif config.executor == "torch" and group.device.type != "cpu":
        problem = f"executor='torch' must have a group on cpu, not on {group.device}; use 'triton'"
    else:
        problem = None
        if config.executor == "triton":
            try:
                make_executor(config, group.device)
            except InputError as error:
                problem = str(error)
    everyone = group.gather_objects((dataclasses.asdict(config), problem))
    problems = [found for _, found in everyone if found is not None]
    if problems:
        raise InputError(problems[0])
    for name, value in everyone[0][0].items():
        for rank, (other, _) in enumerate(everyone):
            if other[name] != value:
                raise InputError(
                    f"{name}={other[name]} on rank {rank} must be {value} as on rank 0"
                )
    return Context(config, group, plan_ours(config))


def dry_run(config: MoEConfig, kind: int) -> list[Logged]:
    """The launches of one forward (0) or backward (1) of a group, from shapes alone.

    On fake tensors: nothing is allocated and no device value exists, so none can be branched on.
    """
    plan, log = plan_ours(config), Dry()
    with FakeTensorMode():
        arenas_PB = torch.empty(config.ep, plan.arena_bytes, dtype=torch.uint8)
        bases_P = torch.empty(config.ep, dtype=torch.int64)
        for part in parts_of(config, kind):
            for rank in range(config.ep):
                step = make_step(
                    config,
                    RankMemory(plan, arenas_PB, bases_P, rank),
                    log,
                    rank,
                    entry=0,
                    saves=config.training,
                )
                step.x_TD, step.ids_TK, step.scores_TK, step.weights = fake_inputs(config)
                add_outputs(step, kind)
                if isinstance(part, Phase):
                    part.run(step)
    return log.log


def make_step(
    config: MoEConfig, memory: RankMemory, executor: Executor, rank: int, entry: int, saves: bool
) -> Step:
    return Step(
        config=config,
        plan=memory.plan,
        memory=memory,
        executor=executor,
        rank=rank,
        entry=entry,
        saves=saves,
    )


def fake_inputs(config: MoEConfig) -> tuple[Tensor, Tensor, Tensor, Weights]:
    """Uninitialised inputs of one rank: x, ids, scores, weights."""
    c, dtype = config, getattr(torch, config.dtype)
    return (
        torch.empty(c.T, c.D, dtype=dtype),
        torch.empty(c.T, c.K, dtype=torch.int64),
        torch.empty(c.T, c.K, dtype=torch.float32),
        Weights(
            torch.empty(c.local_experts, 2 * c.F, c.D, dtype=dtype),
            torch.empty(c.local_experts, c.D, c.F, dtype=dtype),
        ),
    )


def add_outputs(step: Step, kind: int) -> None:
    """Uninitialised outputs of a call that wants every gradient."""
    c, dtype = step.config, getattr(torch, step.config.dtype)
    if kind == FORWARD:
        step.y_TD = torch.empty(c.T, c.D, dtype=dtype)
        return
    step.dy_TD = torch.empty(c.T, c.D, dtype=dtype) if step.dy_TD is None else step.dy_TD
    step.dx_TD = torch.empty(c.T, c.D, dtype=dtype)
    step.dscores_TK = torch.empty(c.T, c.K, dtype=torch.float32)
    step.gradients = fake_inputs(c)[-1]


__all__ = ["BACKWARD", "FORWARD", "Context", "VirtualGroup", "create_context", "dry_run"]
