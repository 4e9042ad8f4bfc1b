"""The three errors a person can meet, and the one signal that is not an error."""

from __future__ import annotations


class TwinreelError(Exception):
    """Base of the errors below; `exit_code` is what the command line ends with."""

    exit_code = 1


class RequestError(TwinreelError):
    """The person's input cannot be run: the message names field, value, rule and what to do. HTTP 422, exit 2."""

    exit_code = 2

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message

    def under(self, place: str) -> RequestError:
        """The same of a field inside `place`, such as one request of a list."""
        made = RequestError(f"{place}.{self.field}", self.message)
        for note in getattr(self, "__notes__", ()):
            made.add_note(note)
        return made

    def __reduce__(self) -> tuple[type[RequestError], tuple[str, str], dict[str, object]]:
        """Travels between processes."""
        return type(self), (self.field, self.message), self.__dict__


class ConfigError(TwinreelError):
    """The operator's choice cannot work on this machine or in this combination. Exit 3."""

    exit_code = 3


class CheckpointError(TwinreelError):
    """The weights or their config files are missing, incomplete or of another kind. Exit 4."""

    exit_code = 4


class Cancelled(Exception):
    """`Engine.cancel()` ended the request at a step or clip; the engine stays usable. `signal`: what made it, if one."""

    signal: int | None = None


def is_fatal(error: BaseException) -> bool:
    """Whether the device can be trusted no more after this error (a CUDA fault stays in its process for good)."""
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
