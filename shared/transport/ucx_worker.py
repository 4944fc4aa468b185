"""The UCX worker and the requests in flight on it. The one file that imports ``ucxx``, when a worker opens.

Everything here runs on the thread that opened the worker. UCX errors leave as typed errors.

Addresses are sealed before workers tell them to each other over the bus: UCX ends the process that it is given a broken
address in (``Assertion ... failed``, tried with 1.21). The seal is a checksum behind the address, where UCX does not
look. It tells a broken address from a whole one; anyone who means harm can make one.

Inside a host a receiver copies out of its sender's memory (``process_vm_readv``). Where the sender has died before it
does, UCX ends the receiver's process, unless the process takes the endpoint's errors; and only endpoints that are made
with error handling, for which UCX then avoids that way of copying, get a handler from ``ucxx``. UCX itself gives any
endpoint one, by a call that ``ucxx`` does not have: ``_survive_failure`` makes it. ``_transports`` makes another one,
which tells how an endpoint reaches its peer.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from shared.errors import BadAddress, PeerLost, TransportError
from shared.transport.base import Buffer

_MAGIC = b"blz1"
_SEAL_BYTES = len(_MAGIC) + 8


def seal(address: bytes) -> bytes:
    """A UCX worker address as it is told to others."""
    return address + _MAGIC + xxhash.xxh3_64_digest(address)


def check(address: bytes) -> None:
    """Raises ``BadAddress`` unless ``address`` is sealed, and as it was."""
    if len(address) <= _SEAL_BYTES or seal(address[:-_SEAL_BYTES]) != address:
        raise BadAddress(f"{len(address)} bytes that are no worker's address", param="transport_address")


MOMENT_S = 0.0005
RELEASE_S = 0.1
"""At the end, for what is on its way."""
RDMA_DEVICES = Path("/dev/infiniband")
TCP_SEGMENT = "512k"
"""Of UCX's TCP: a chunk in one system call."""
CMA_SEGMENT = "8m"
"""Of copies out of another process's memory (``process_vm_readv``), inside a host: a chunk in one system call. In
UCX's own 512 KiB the largest chunks took 75 to 78 % of the rate of a memory copy, so 80 to 92 %."""

Ended = Callable[[Exception | None], None]
"""What to do when a request completes: with its error, or None."""

_log = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_FIELD_ERR_HANDLER = 1 << 2
_FIELD_TRANSPORTS = 1 << 3
_MAX_TRANSPORTS = 32
"""Of an endpoint. It has a lane of each that it uses, 16 at most."""
_ErrorHandler = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


class _EndpointParams(ctypes.Structure):
    """The head of ``ucp_ep_params_t``, as far as it is read when only the handler is given."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("address", ctypes.c_void_p),
        ("err_mode", ctypes.c_int),
        ("err_handler", _ErrorHandler),
        ("err_handler_arg", ctypes.c_void_p),
        ("rest", ctypes.c_uint64 * 32),
    )


def _ignore(argument: int | None, endpoint: int | None, status: int) -> None:
    """Those that wait learn of it: UCX ends the endpoint's requests with the error."""
    del argument, endpoint, status


_HANDLER = _ErrorHandler(_ignore)
"""Kept for the life of the process: endpoints point to it."""


def _survive_failure(handle: int) -> None:
    """Take the errors of the endpoint with this handle (a ``ucp_ep_h``)."""
    modify = _function("ucp_ep_modify_nb")
    if modify is None:
        _log.warning("this UCX has no ucp_ep_modify_nb: a process ends with the peer of its host that it copies from")
        return
    params = _EndpointParams(field_mask=_FIELD_ERR_HANDLER, err_handler=_HANDLER)
    problem = modify(handle, ctypes.byref(params))
    if problem:
        _log.warning("UCX takes no error handler for an endpoint (status %s)", ctypes.c_int(problem).value)


class _Transport(ctypes.Structure):
    """``ucp_transport_entry_t``. The texts are UCX's, for as long as the endpoint is open."""

    _fields_ = (("name", ctypes.c_char_p), ("device", ctypes.c_char_p))


class _EndpointAttributes(ctypes.Structure):
    """The head of ``ucp_ep_attr_t``."""

    _fields_ = (
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 32),
        ("socket_addresses", ctypes.c_uint64 * 32),
        ("transports", ctypes.POINTER(_Transport)),
        ("num_transports", ctypes.c_uint),
        ("transport_bytes", ctypes.c_size_t),
        ("rest", ctypes.c_uint64 * 32),
    )


def _transports(handle: int) -> tuple[str, ...]:
    """Of the open endpoint with this handle. Empty: UCX does not say."""
    query = _function("ucp_ep_query")
    if query is None or not handle:
        return ()
    entries = (_Transport * _MAX_TRANSPORTS)()
    attributes = _EndpointAttributes(
        field_mask=_FIELD_TRANSPORTS,
        transports=entries,
        num_transports=_MAX_TRANSPORTS,
        transport_bytes=ctypes.sizeof(_Transport),
    )
    problem = ctypes.c_int8(query(handle, ctypes.byref(attributes)) or 0).value
    if problem:
        _log.debug("UCX does not tell an endpoint's transports (status %s)", problem)
        return ()
    used = entries[: min(attributes.num_transports, _MAX_TRANSPORTS)]
    return tuple("/".join((part or b"").decode(errors="replace") for part in (one.name, one.device)) for one in used)


@cache
def _function(name: str) -> Any | None:
    """That one, of an endpoint and a structure, of the UCX that this process has loaded. None: it has none."""
    files = {line.split()[-1] for line in _MAPS.read_text(encoding="utf-8").splitlines() if "/libucp" in line}
    for file in sorted(files):
        function = getattr(ctypes.CDLL(file), name, None)
        if function is not None:
            function.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
            function.restype = ctypes.c_void_p
            return function
    return None


class _Posted(NamedTuple):
    """What belongs to a request in flight."""

    array: Any
    ended: Ended
    endpoint: Any = None
    """Of a send."""


class UcxWorker:
    """Made by ``open_worker``; ``release`` ends it."""

    def __init__(self, ucx: Any, array: Any, options: Mapping[str, str]) -> None:
        self._ucx = ucx
        self._array = array
        # UCX reads UCX_* from the environment for every option that is not given here.
        self._context: Any = ucx.UCXContext(dict(options), (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker: Any = ucx.UCXWorker(self._context)
        self._worker.init_blocking_progress_mode()
        self._any_tag = ucx.UCXXTag(0)
        self._any_mask = ucx.UCXXTagMask(0)
        # UCX request -> its buffer, which UCX does not keep alive, and what to do when it completes.
        self._active: dict[Any, _Posted] = {}
        self._given_up: dict[Any, _Posted] = {}
        self.address: bytes = seal(self._worker.address.tobytes())
        self.event_fd: int = self._worker.epoll_file_descriptor

    @property
    def busy(self) -> bool:
        """Whether requests are in flight that may be expected to complete."""
        return bool(self._active)

    def array(self, buffer: Buffer) -> Any:
        """The buffer as UCX wants it. Raises ``TransportError`` for what is no C-contiguous buffer."""
        try:
            array = self._array(buffer)
        except (TypeError, ValueError, BufferError) as error:
            raise TransportError(f"not a buffer: {error}") from error
        if not array.c_contiguous:
            raise TransportError("the buffer is not C-contiguous")
        return array

    def endpoint(self, address: bytes, *, same_host: bool) -> Any:
        """An endpoint to a worker address, with error handling between hosts only. Raises ``TransportError``."""
        try:
            endpoint = self._worker.create_endpoint_from_worker_address(
                self._ucx.UCXAddress.create_from_buffer(address), not same_host
            )
        except (self._ucx.UCXError, ValueError, IndexError) as error:  # also of an empty address
            raise TransportError(f"cannot connect: {error}") from error
        if same_host:
            _survive_failure(endpoint.handle)
        return endpoint

    def transports(self, endpoint: Any) -> tuple[str, ...]:
        """What an open endpoint runs over: ``tcp/eth0``. Empty: UCX does not say."""
        return _transports(endpoint.handle)

    def send(self, endpoint: Any, array: Any, tag: int, ended: Ended) -> None:
        """Send ``array``. Raises ``PeerLost`` at once for a broken endpoint."""
        try:
            request = endpoint.tag_send(array, self._ucx.UCXXTag(tag))
        except self._ucx.UCXError as error:
            raise PeerLost(f"the connection broke: {error}") from error
        self._track(request, _Posted(array, ended, endpoint))

    def receive(self, message: Any, array: Any, ended: Ended) -> None:
        """Receive a probed message of exactly the array's length into it."""
        self._track(self._worker.tag_recv_with_handle(array, message), _Posted(array, ended))

    def discard(self, message: Any) -> None:
        """Let UCX throw a probed message away: received into nothing, it counts as truncated and its sender is done."""
        self.receive(message, self._array(bytearray(1)), lambda _: None)

    def probe(self) -> Any | None:
        """The next message that arrived, taken off UCX's own list; None when there is none."""
        message = self._worker.tag_probe(self._any_tag, self._any_mask, True)
        return message if message.matched else None

    def progress(self) -> bool:
        """Let UCX work for a moment; whether it did anything.

        Not ``UCXWorker.progress``, which ends when nothing comes any more: while a peer sends as fast as the link is,
        that is never, and nobody would hear of what has completed, nor post the next receive."""
        if not self._worker.progress_once():
            return False
        end_s = time.monotonic() + MOMENT_S
        while self._worker.progress_once() and time.monotonic() < end_s:
            pass
        return True

    def end_completed(self) -> None:
        """Run what waits for requests that completed."""
        for request in [request for request in (*self._active, *self._given_up) if request.completed]:
            # One that ended before it may have given up the endpoint of this one.
            posted = self._active.pop(request, None) or self._given_up.pop(request, None)
            if posted is not None:
                posted.ended(self._error_of(request))

    def give_up(self, endpoint: Any) -> None:
        """Do not wait for the sends on a closed endpoint: inside a host they may never complete. Their buffers stay
        what they are, UCX's, until they do or the worker ends."""
        for request in [request for request, posted in self._active.items() if posted.endpoint is endpoint]:
            self._given_up[request] = self._active.pop(request)._replace(endpoint=None)

    def arm(self) -> bool:
        """Whether ``event_fd`` will now tell of the next event; False when one is there already."""
        return bool(self._worker.arm())

    def release(self) -> list[Ended]:
        """Give UCX's resources back. Returns what waited for requests that never completed;
        without its worker UCX touches no buffer any more."""
        end_s = time.monotonic() + RELEASE_S
        while self.progress() and time.monotonic() < end_s:
            pass
        left = [posted.ended for posted in (*self._active.values(), *self._given_up.values())]
        self._active.clear()
        self._given_up.clear()
        del self._worker
        return left

    def _track(self, request: Any, posted: _Posted) -> None:
        if request.completed:
            posted.ended(self._error_of(request))
        else:
            self._active[request] = posted

    def _error_of(self, request: Any) -> Exception | None:
        try:
            request.check_error()
        except self._ucx.UCXMessageTruncatedError as error:
            return TransportError(str(error))
        except self._ucx.UCXError as error:
            return PeerLost(f"the connection broke: {error}")
        return None


def has_rdma() -> bool:
    """Whether there is a card that UCX sends memory by without the processor."""
    # A machine without one may have the connection manager's file there.
    return any(RDMA_DEVICES.glob("uverbs*"))


def _options(*, device_memory: bool) -> dict[str, str]:
    """What suits chunks of hundreds of KiB better than UCX's defaults; the environment overrules each."""
    options = {
        # Workers of one host may be in network namespaces of their own (containers), where UCX cannot wake a peer that
        # sleeps because it thinks its interface unused: a first connection from one side timed out.
        "ADAPTIVE_PROGRESS": "n",
        "CMA_SEG_SIZE": CMA_SEGMENT,
    }
    # Memory of a device must not be sent eagerly: each message would be copied to the host piece by piece.
    if not device_memory and not has_rdma():
        # Between hosts it will be TCP. A rendezvous costs a round trip per chunk and saves no copy.
        # Receivers post their buffers before they ask for data, so eager messages do not pile up.
        options |= {
            "RNDV_THRESH": "intra:auto,inter:inf",
            "TCP_TX_SEG_SIZE": TCP_SEGMENT,
            "TCP_RX_SEG_SIZE": TCP_SEGMENT,
        }
    return {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}


def open_worker(*, device_memory: bool = False) -> UcxWorker:
    """Open UCX on the calling thread. ``device_memory``: it will be given some. Raises ``ImportError`` without ``ucxx``
    and whatever UCX raises."""
    # On import ucxx sets variables of UCX's, which are not the user's then. This one it sets when UCX is loaded, too
    # late to be read: UCX would warn of an unused variable that nobody set.
    given, options = "UCX_MEMTYPE_CACHE" in os.environ, _options(device_memory=device_memory)
    from ucxx._lib import libucxx
    from ucxx._lib.arr import Array

    if not given:
        os.environ.pop("UCX_MEMTYPE_CACHE", None)
    return UcxWorker(libucxx, Array, options)
