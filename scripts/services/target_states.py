"""A target's states from a running vLLM: the connector that writes them, and the middleware that sends them.

    vllm serve TARGET --speculative-config '{"method": "extract_hidden_states", "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [2, 18, 33, 36]}}}'
      --kv-transfer-config '{"kv_connector": "StatesConnector", "kv_role": "kv_producer",
        "kv_connector_module_path": "draftsmith.scripts.services.target_states",
        "kv_connector_extra_config": {"shared_storage_path": "/dev/shm/states"}}'
      --middleware draftsmith.scripts.services.target_states.StatesMiddleware

vLLM 0.32 keeps the states after these layers in a cache of its own, and its connector writes a file for each request:
`hidden_states`, (T, layers, H) in the target's dtype, and `token_ids`, (T,). Layer 0 is the embeddings; no state has
the final norm. The answer of `/v1/completions` has the file's path in `kv_transfer_params`.

    GET /draftsmith/target          what is served: the model, its files' fingerprint, its layers
    GET /draftsmith/states/NAME     a file of states, which is removed then

draftsmith may be installed here without its dependencies: this imports what vLLM brings, and the standard library.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from draftsmith.train.files import identity

if find_spec("vllm"):
    from vllm import __version__ as version
    from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
        ExampleHiddenStatesConnector,
        extract_from_kv_cache,
    )
    from vllm.v1.request import RequestStatus
else:  # the middleware runs without vLLM, too
    version, ExampleHiddenStatesConnector = "", object

NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
"""The name of a file of states, a hash of vLLM's id of the request."""
ORPHANED = 600.0
"""Seconds after which nobody will ask for a file any more."""
LOOK = 60.0
"""The seconds between two looks for such files during a run: one at a thousand files takes 0.1 s."""
PIECE = 4 << 20
"""Bytes of a file that are read at once: much smaller ones halve the rate."""
PATIENCE = 0.005
"""Seconds between two looks at the lock of a file that is being written."""


class StatesConnector(ExampleHiddenStatesConnector):
    """vLLM's connector of states, which also runs on a CPU; a file appears whole, and never for a broken request."""

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Tell the worker where to write; a request's id has what its client sent, and must not lead elsewhere."""
        meta = super().build_connector_meta(scheduler_output)
        for request in meta.new_req_filenames:
            meta.new_req_filenames[request] = self._request_filenames[request] = self._file(request)
        return meta

    def _file(self, request: str) -> str:
        # Two requests with one file would wait for each other's lock, and all others with them.
        name = hashlib.sha256(request.encode("utf-8", "backslashreplace")).hexdigest()
        return os.path.join(self._storage_path, f"{name}.safetensors")

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Have the states of a finished request written; those of one that broke off may not even be computed."""
        if request.status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
            self._request_filenames.pop(request.request_id, None)
            return False, None
        return super().request_finished(request, block_ids)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Start the writes, and return the requests whose blocks are free; remove the locks of broken requests."""
        pending = self._get_connector_metadata().pending_saves if self.has_connector_metadata() else []
        for broken in (finished_req_ids & self._lock_fds.keys()) - {save.req_id for save in pending}:
            Path(f"{self._file(broken)}.lock").unlink(missing_ok=True)
        return super().get_finished(finished_req_ids)

    def _submit_async_write(self, pending: Any) -> None:
        """Copy a request's states from the cache, and have them written by another thread."""
        if self._kv_cache.device.type != "cpu" or not self._is_tp_rank_zero:
            return super()._submit_async_write(pending)
        starts = torch.tensor(pending.block_ids) * self._block_size
        slots = (starts[:, None] + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        # The copy is complete: vLLM may use the blocks again.
        copied = self._req_copy_events[pending.req_id] = torch.cpu.Event()
        future = self._req_futures[pending.req_id] = self._executor.submit(
            self._write_tensors,
            {"hidden_states": states, "token_ids": pending.token_ids},
            copied,
            pending.filename,
            self._lock_fds.pop(pending.req_id, None),
        )
        future.add_done_callback(partial(self._on_write_done, pending.req_id))

    @staticmethod
    def _write_tensors(tensors: dict[str, torch.Tensor], copied: Any, filename: str, lock: int | None) -> None:
        """Write a file in a folder of its own, rename it and release its lock: a full disk leaves no half of it."""
        # The library's temporary file has a random name: without the folder nothing would find it after a crash.
        aside = Path(f"{filename}.partial")
        try:
            aside.mkdir(exist_ok=True)
            ExampleHiddenStatesConnector._write_tensors(tensors, copied, str(aside / "states"), None)
            os.replace(aside / "states", filename)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            if lock is not None:
                os.close(lock)


def refusal(status: int, message: str) -> Response:
    """Return an error in the form of vLLM's."""
    return JSONResponse({"error": {"message": message, "code": status}}, status)


NOT_FOUND = refusal(404, "expected the name of a file that an answer of /v1/completions gave, found another")
NOT_WRITTEN = refusal(500, "expected states, found that they could not be written: see the server's log")


class StatesMiddleware:
    """Answers of the paths of states, which want the server's API key, if it has one; all others are vLLM's."""

    def __init__(self, app: ASGIApp):
        self._app = app
        self._target: dict[str, Any] | None = None
        self._looked = float("-inf")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or leave it to vLLM."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "GET" or not path.startswith("/draftsmith/"):
            return await self._app(scope, receive, send)
        state = scope["app"].state
        if not authorized(Headers(scope=scope), state.args.api_key or [os.environ.get("VLLM_API_KEY")]):
            return await refusal(401, "expected its API key, which VLLM_API_KEY holds")(scope, receive, send)
        folder, name = storage(state.vllm_config), path.removeprefix("/draftsmith/states/")
        if path == "/draftsmith/target" or time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            # Clients die, and others than trainers leave all of theirs.
            await run_in_threadpool(remove_orphans, folder)
        if path == "/draftsmith/target":
            if self._target is None:
                self._target = await run_in_threadpool(target_of, state.vllm_config)
            await JSONResponse(self._target)(scope, receive, send)
        elif folder is None or not NAME.fullmatch(name) or (folder / name).is_symlink():
            await NOT_FOUND(scope, receive, send)
        else:
            await send_states(folder / name, scope, receive, send)


async def send_states(file: Path, scope: Scope, receive: Receive, send: Send) -> None:
    """Wait until a file of states is written, remove it with its lock, and send it."""
    lock = Path(f"{file}.lock")
    try:
        with lock.open("rb") as held:
            while not locked(held, fcntl.LOCK_SH):
                await asyncio.sleep(PATIENCE)
            # An open file needs no name: nothing stays on the disk, whether the client reads to the end or not.
            states = file.open("rb") if file.is_file() else None
            for part in (file, lock):
                part.unlink(missing_ok=True)
    except FileNotFoundError:
        return await NOT_FOUND(scope, receive, send)
    if states is None:
        return await NOT_WRITTEN(scope, receive, send)
    with states:
        headers = {"Content-Length": str(os.fstat(states.fileno()).st_size)}
        await StreamingResponse(pieces(states), 200, headers, "application/octet-stream")(scope, receive, send)


async def pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield an open file in pieces."""
    while piece := await run_in_threadpool(file.read, PIECE):
        yield piece


def locked(file: IO[bytes], kind: int) -> bool:
    """Lock an open file until it is closed, unless another process holds its lock; return whether it is locked."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_orphans(folder: Path | None) -> None:
    """Remove old states that nobody writes or reads: those who asked for them have died."""
    for lock in folder.glob("*.safetensors.lock") if folder else ():
        file = lock.with_suffix("")
        with suppress(OSError), lock.open("rb") as held:  # others take theirs meanwhile
            written = file.stat().st_mtime if file.exists() else os.fstat(held.fileno()).st_mtime
            if written < time.time() - ORPHANED and locked(held, fcntl.LOCK_EX):
                shutil.rmtree(f"{file}.partial", ignore_errors=True)
                for part in (file, lock):
                    part.unlink(missing_ok=True)


def storage(config: Any) -> Path | None:
    """Return the connector's folder, from vLLM's config; None without a connector."""
    transfer = config.kv_transfer_config
    return transfer and Path(transfer.get_from_extra_config("shared_storage_path", "/tmp"))


def target_of(config: Any) -> dict[str, Any]:
    """Return what is served, from vLLM's config; `layer_ids` are those of the states, in their order."""
    model, speculative = config.model_config, config.speculative_config
    extracts = speculative is not None and speculative.method == "extract_hidden_states"
    layers = speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids if extracts else []
    try:
        found = identity(model.model, revision=model.revision)
    except (OSError, ValueError):  # neither a directory nor a model of the hub with a config
        found = {"commit": None}
    place = Path(model.model)  # offline, that of a hub's model is the folder of its commit
    return {
        "model": model.model,
        "revision": model.revision,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "layer_ids": sorted(set(layers)),  # the order in which vLLM stacks the states
        "num_hidden_layers": model.get_total_num_hidden_layers(),
        "hidden_size": model.get_hidden_size(),
        "max_model_len": model.max_model_len,
        "files": None if "commit" in found else found,
        "commit": place.name if place.parent.name == "snapshots" else found.get("commit"),
        "vllm": version,
    }


def authorized(headers: Headers, keys: Iterable[str | None]) -> bool:
    """Return whether a request has one of the server's keys, or the server has none."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    # Every key is compared, in a time that tells nothing of it.
    same = [secrets.compare_digest(given.encode(), key.encode()) for key in keys if key]
    return not same or (scheme.lower() == "bearer" and any(same))
