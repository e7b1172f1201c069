"""The worker as a service: load, register, execute plans; after a failed step or a death go on under a new id."""

import asyncio
import gc
import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import structlog

from services.worker.aside import aside, leave_if_under_way
from services.worker.executor import Later, Loaded
from services.worker.hung_step import HungStep
from services.worker.life import FLUSH_S, Ended, Life, Workplace, leave
from services.worker.plan_draft import Model
from services.worker.progress import LoadingStopped, Progress
from services.worker.residents import Ledger
from services.worker.step_thread import StepThread
from shared.bus.port import Bus, Part
from shared.bus.redis_bus import RedisBus
from shared.errors import DeclaredDead
from shared.ids import WorkerId
from shared.protocol import names
from shared.protocol.codec import encode
from shared.protocol.messages import TokenizerFiles
from shared.runtime.clock import monotonic
from shared.runtime.part import Identity, registration, wait_for_bus
from shared.runtime.settings import WorkerSettings

log = structlog.get_logger()

_HASH_KEY_BYTES = 32

Load = Callable[[WorkerSettings, Progress], Loaded]


async def serve(settings: WorkerSettings, stopping: asyncio.Event) -> None:
    """Serve a model until ``stopping`` is set. Raises StartupError if the model or Redis cannot be had."""
    bus = RedisBus(settings.redis_url)
    try:
        await serve_on(bus, settings, stopping)
    finally:
        await bus.close()
    leave_if_under_way()


async def serve_on(
    bus: Bus,
    settings: WorkerSettings,
    stopping: asyncio.Event,
    *,
    load: Load | None = None,
    flush_s: float = FLUSH_S,
    hung_step: HungStep = HungStep(),  # noqa: B008 - frozen
) -> None:
    """Serve on a bus; ``load`` stands in for the executor that the settings name."""
    await wait_for_bus(bus, stopping)
    with StepThread() as thread:
        with _no_collector():
            loaded = await _load(load or _loader(settings), settings, thread, stopping)
        if loaded is None:
            return
        workplace = Workplace(bus, loaded.executor, thread, hung_step, flush_s=flush_s)
        async with asyncio.TaskGroup() as tasks:
            later = tasks.create_task(_do_later(loaded.later, thread, stopping))
            await _live(workplace, loaded, settings.model_name, stopping)
            later.cancel()


async def _do_later(later: Later | None, thread: StepThread, stopping: asyncio.Event) -> None:
    """Do what may be done beside the first steps, and its last part between two of them. Serving never ends by it."""
    if later is None:
        return
    try:
        finish = await aside(later, "later")
        afterwards = None if stopping.is_set() else await thread.call(finish)
        if afterwards is not None:
            await aside(afterwards, "later")
    except Exception:  # what has been served until now goes on being served
        log.exception("step_program_failed")


def content_hash_of(files: TokenizerFiles) -> str:
    """Return the name under which gateways find these tokenizer files."""
    return hashlib.sha256(encode(files)).hexdigest()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Load without the garbage collector, which finds nothing in what imports leave: 5.5 s instead of 7.2 s.

    What is loaded stays, so the collector never looks at it again either.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _loader(settings: WorkerSettings) -> Load:
    """Return what loads the executor. Imported here: the fake one must start without torch."""
    if settings.executor == "fake":
        from services.worker.fake_executor import load_fake  # noqa: PLC0415 - see above

        return load_fake
    from services.worker.loading import load_torch  # noqa: PLC0415 - see above

    return load_torch


async def _load(load: Load, settings: WorkerSettings, thread: StepThread, stopping: asyncio.Event) -> Loaded | None:
    """Load on the step thread; None if ``stopping`` was set meanwhile."""
    progress = Progress()
    begun_s = monotonic()
    loading = asyncio.ensure_future(thread.call(load, settings, progress))
    stop = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({loading, stop}, return_when=asyncio.FIRST_COMPLETED)
    progress.stopping.set()
    stop.cancel()
    try:
        loaded = await loading
    except LoadingStopped:
        return None
    size = loaded.executor.size
    log.info(
        "model_loaded",
        model=settings.model_name,
        blocks=size.blocks,
        max_model_len=size.max_model_len,
        dtype=loaded.dtype,
        load_s=round(monotonic() - begun_s, 2),
    )
    return loaded


async def _live(workplace: Workplace, loaded: Loaded, model: str, stopping: asyncio.Event) -> None:
    """Live one life after the other with the same weights, until ``stopping``."""
    identity = Identity("worker")
    content_hash = content_hash_of(loaded.tokenizer)
    value = registration("worker", model, tokenizer=content_hash)
    tokenizer = {names.tokenizer(content_hash): encode(loaded.tokenizer)}
    what_it_is = Model(frozenset(loaded.tokenizer.eos_ids), loaded.executor.vocabulary)
    while not stopping.is_set():
        worker = WorkerId(identity.next_life())
        part = Part(worker, names.members("worker", model), (names.plans(worker), names.results(worker)), tokenizer)
        ledger = Ledger(worker, loaded.executor.size, what_it_is, secrets.token_bytes(_HASH_KEY_BYTES))
        life = Life(workplace, part, ledger)
        size = loaded.executor.size
        log.info("worker_ready", worker=worker, blocks=size.blocks, dtype=loaded.dtype)
        ended = await _one_life(life, worker, value, stopping)
        log.info("worker_life_ended", worker=worker, why=ended, **asdict(life.counts))
        if ended == "stopping":
            await leave(workplace.bus, part)
        # else its streams stay until they expire: the leader has yet to read why this life ended
        # whatever a step left in the pool belongs to requests that are run again elsewhere, or here from the start
        await workplace.hung_step.or_idle(workplace.thread, loaded.executor.forget, stopping)


async def _one_life(life: Life, worker: WorkerId, value: bytes, stopping: asyncio.Event) -> Ended:
    ended: Ended = "declared_dead"
    try:
        ended = await life.run(value, stopping)
    except* DeclaredDead:
        log.warning("worker_declared_dead", worker=worker)
    return ended
