"""Every error that crosses a service boundary.

    BlitzError                       code                    HTTP
    ├── BadRequest                   bad_request             400
    │   ├── BadTopology              bad_topology            400
    │   ├── BadName                  bad_name                400
    │   ├── BadAddress               bad_address             400
    │   ├── UnsupportedParameter     unsupported_parameter   400
    │   └── ContextLengthExceeded    context_length_exceeded 400
    ├── Unauthorized                 unauthorized            401
    ├── NotFound                     not_found               404
    │   ├── ModelNotFound            model_not_found         404
    │   └── PlanNotFound             plan_not_found          404
    ├── Conflict                     conflict                409
    │   ├── StaleTerm                stale_term              409
    │   ├── DuplicateId              duplicate_id            409
    │   └── WrongCluster             wrong_cluster           409
    ├── PayloadTooLarge              payload_too_large       413
    ├── BadCheckpoint                bad_checkpoint          422
    │   └── CheckpointChanged        checkpoint_changed      422
    ├── BadProfile                   bad_profile             422
    ├── Overloaded                   overloaded              429
    │   └── RateLimitExceeded        rate_limit_exceeded     429
    ├── Internal                     internal                500
    │   ├── NotPermitted             not_permitted           500
    │   └── RequestFailed            request_failed          500
    │       └── PoisonRequest        poison_request          500
    ├── Unavailable                  unavailable             503
    │   ├── EngineBroken             engine_broken           503
    │   ├── InProgress               in_progress             503
    │   ├── NoResponder              no_responder            503
    │   ├── SentBack                 sent_back               503
    │   └── NoCapacity               no_capacity             503
    │       └── Unservable           unservable              503
    ├── DeadlineExceeded             deadline_exceeded       504
    └── TransportError               transport               500
        ├── PeerLost                 peer_lost               500
        └── TransferAborted          transfer_aborted        500

An error travels as its code and message (``shared.bus`` puts them in headers,
the gateway in the OpenAI error body) and is matched by code, never by text.
"""

from __future__ import annotations

from typing import ClassVar


class BlitzError(Exception):
    """Base of all typed errors. ``param`` names the offending input, if one does."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(BlitzError):
    """The caller's input is malformed or out of range."""

    code = "bad_request"
    http_status = 400


class BadTopology(BadRequest):
    """Records of workers, sources or flows that contradict each other or name what is not there."""

    code = "bad_topology"


class BadName(BadRequest, ValueError):
    """An id that cannot be part of a subject: no process has it, and none that had it could be spoken to."""

    code = "bad_name"


class BadAddress(BadRequest):
    """Bytes that are no worker's transport address: no peer can be reached there."""

    code = "bad_address"


class UnsupportedParameter(BadRequest):
    """A parameter that OpenAI defines and this system does not implement."""

    code = "unsupported_parameter"


class ContextLengthExceeded(BadRequest):
    """Prompt plus requested output does not fit the model's context."""

    code = "context_length_exceeded"


class Unauthorized(BlitzError):
    """Missing or wrong API key."""

    code = "unauthorized"
    http_status = 401


class NotFound(BlitzError):
    """What was asked for does not exist."""

    code = "not_found"
    http_status = 404


class ModelNotFound(NotFound):
    """No model of that name is registered."""

    code = "model_not_found"


class PlanNotFound(NotFound):
    """No scale operation of that id is known."""

    code = "plan_not_found"


class Conflict(BlitzError):
    """The request contradicts the current state; nothing was changed."""

    code = "conflict"
    http_status = 409


class StaleTerm(Conflict):
    """Another process leads by now; the one that asked does no longer."""

    code = "stale_term"


class DuplicateId(Conflict):
    """Another living process holds this gateway's or worker's id; the one that is told ends."""

    code = "duplicate_id"


class WrongCluster(Conflict):
    """These servers are another cluster's; the process that finds it ends."""

    code = "wrong_cluster"


class PayloadTooLarge(BlitzError):
    """The message would exceed the bus's ``max_payload``."""

    code = "payload_too_large"
    http_status = 413


class BadCheckpoint(BlitzError):
    """A checkpoint directory that cannot be served; the message names file and tensor."""

    code = "bad_checkpoint"
    http_status = 422


class CheckpointChanged(BadCheckpoint):
    """A file of a checkpoint, or a unit read from it, is not what was registered; the message names it."""

    code = "checkpoint_changed"


class BadProfile(BlitzError):
    """A file that is no profile, or one of something else: another model, engine, device or version."""

    code = "bad_profile"
    http_status = 422


class Overloaded(BlitzError):
    """A bounded queue is full."""

    code = "overloaded"
    http_status = 429


class RateLimitExceeded(Overloaded):
    """A client's key has used what it may."""

    code = "rate_limit_exceeded"
    limit: str = ""
    """Which of its limits: ``requests``, ``tokens`` or ``concurrent``."""


class Internal(BlitzError):
    """A fault of ours."""

    code = "internal"
    http_status = 500


class RequestFailed(Internal):
    """The engine fails on this request and computes others: another instance would say the same."""

    code = "request_failed"


class PoisonRequest(RequestFailed):
    """The request was running in several workers that died, at last by itself: it is given to no other."""

    code = "poison_request"


class NotPermitted(Internal):
    """The bus refuses this to the credentials that the service was given: the deployment is wrong, not its user."""

    code = "not_permitted"


class Unavailable(BlitzError):
    """The service that must answer cannot do so now."""

    code = "unavailable"
    http_status = 503


class EngineBroken(Unavailable):
    """An engine computes nothing any more: its worker ends, its requests go on elsewhere."""

    code = "engine_broken"


class NoResponder(Unavailable):
    """No process listens on the subject."""

    code = "no_responder"


class SentBack(Unavailable):
    """Who goes gives back what was asked of it, an instance a request, a worker a copy to hold. It is done elsewhere:
    nothing failed."""

    code = "sent_back"


class InProgress(Unavailable):
    """What was asked for is being done; asked again, the answer may be there."""

    code = "in_progress"


class NoCapacity(Unavailable):
    """Not enough spare workers."""

    code = "no_capacity"


class Unservable(NoCapacity):
    """No worker that is registered could ever do this: waiting does not help, an operator has to act."""

    code = "unservable"


class DeadlineExceeded(BlitzError):
    """No answer within the deadline."""

    code = "deadline_exceeded"
    http_status = 504


class TransportError(BlitzError):
    """The tensor transport failed."""

    code = "transport"


class PeerLost(TransportError):
    """The peer of a transfer died or its connection broke."""

    code = "peer_lost"


class TransferAborted(TransportError):
    """The transfer was cancelled on this side."""

    code = "transfer_aborted"


def _subclasses(cls: type[BlitzError]) -> list[type[BlitzError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


def error_from_code(
    code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> BlitzError:
    """The typed error for a code that came over the wire; unknown codes become ``Internal``."""
    for cls in _subclasses(BlitzError)[1:]:
        if cls.code == code:
            return cls(message, param=param, retry_after_s=retry_after_s)
    return Internal(f"{code}: {message}", param=param)
