"""What went wrong with the hub, in one line that says what to do. Knows the library's errors and their causes."""

import errno

from voicechat_core.hub_cache import cache_directory

__all__ = ["explained"]


def explained(name: str, error: BaseException) -> str:
    """One line that names the repository and says what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # "not on this disk" hides why it could not be fetched
    return f"{name}: {_reason(error, f'{constants.ENDPOINT}/{name}')}"


def _reason(error: BaseException, page: str) -> str:
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

    if isinstance(error, GatedRepoError):
        return f"gated: accept its licence at {page}, then log in with `hf auth login`"
    if isinstance(error, OfflineModeIsEnabled):
        return "offline mode is on (HF_HUB_OFFLINE)"
    if isinstance(error, HfHubHTTPError):
        status, message = error.response.status_code, error.server_message or ""
        return _answer(404 if isinstance(error, RepositoryNotFoundError) else status, " ".join(message.split()))
    if _is_transport(error):
        return f"the hub cannot be reached ({_line(error)})"
    return _failure(error)


def _is_transport(error: BaseException) -> bool:
    """By name: the library's HTTP client has changed before, and is not ours to depend on."""
    return any(kind.__name__ == "TransportError" and "httpx" in kind.__module__ for kind in type(error).__mro__)


def _answer(status: int, message: str) -> str:
    said = f" ({message})" if message else ""
    if "Invalid credentials" in message:
        return f"the hub does not accept this login{said}: log in again with `hf auth login`"
    if status in (401, 404):  # it does not say which of the two to those who may not know
        return "no such repository on the hub, or a private one: if it is yours, log in with `hf auth login`"
    if status == 403:
        return f"the hub answered 403{said}: log in with `hf auth login` as somebody who may read it"
    return f"the hub answered {status}{said}; try again later"


def _failure(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error):
        return f"the disk is full: {cache_directory()} cannot take the download"
    return f"it could not be fetched ({_line(error)})"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
