"""What all frontends of a server count together, in the supervisor: quotas, the queue, metrics.

Knows: frontends by name, their questions. Does not know: processes, sockets, requests' contents.
"""

from quill.server.auth.tickets import Tickets
from quill.server.engine.admission import QueueAdmission
from quill.server.errors import PlainError, RequestError, plain_error
from quill.server.process.control import (
    Admit,
    Answer,
    Close,
    Generated,
    Left,
    OpenCall,
    OpenTokens,
)

Counted = Admit | OpenCall | OpenTokens | Close | Generated | Left


class Counts:
    """Of one server."""

    def __init__(self, max_queue: int) -> None:
        self._tickets = Tickets()
        self._admission = QueueAdmission(max_queue)
        self._waiting: dict[str, set[str]] = {}  # request ids of each frontend

    def handle(self, frontend: str, message: Counted) -> Answer | None:
        """None: no answer is expected."""
        if isinstance(message, Generated):
            self._tickets.note(frontend, message.num_generated)
            return None
        if isinstance(message, Left):
            self._admission.leave(message.started, message.failed)
            self._waiting.get(frontend, set()).difference_update(message.started, message.failed)
            return None
        return Answer(message.number, self._error(frontend, message))

    def forget(self, frontend: str) -> None:
        """It has died: the engine cancels its requests."""
        self._tickets.close_all(frontend)
        self._admission.leave((), tuple(self._waiting.pop(frontend, ())))

    def _error(
        self, frontend: str, message: Admit | OpenCall | OpenTokens | Close
    ) -> PlainError | None:
        if isinstance(message, Admit):
            return self._admit(frontend, message)
        if isinstance(message, OpenCall):
            return self._tickets.open_call(frontend, message.ticket, message.caller)
        if isinstance(message, Close):
            self._tickets.close(frontend, message.ticket, message.num_generated, message.is_read)
            return None
        return self._tickets.open_tokens(
            frontend, message.ticket, message.caller, message.num_prompt, message.is_admitted
        )

    def _admit(self, frontend: str, message: Admit) -> PlainError | None:
        try:
            self._admission.admit(message.request_id, message.owner, message.deadline_s)
        except RequestError as error:
            return plain_error(error)
        self._waiting.setdefault(frontend, set()).add(message.request_id)
        return None
