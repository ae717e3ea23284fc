"""Addresses with logins: what may be shown of a URL, and the login of a server that the user has put into the environment.

A login is part of a URL by custom (http://user:password@host). Flags, settings, logs, error messages and metrics can be read by
others, so there it must not stand: `shown_url` for messages, `refuse_login` for settings, `login_of` where a request is made.
"""

import base64
import os
from urllib.parse import unquote, urlsplit, urlunsplit

from ludic.types.errors import ConfigError

LOGINS_VARIABLE = "LUDIC_HTTP_LOGINS"
"""URLs of HTTP servers with their logins, with spaces between them: http://user:password@host:8000 …"""


def shown_url(url: str) -> str:
    """The address without user, password, query and fragment: keys stand in all of them."""
    try:
        parts = urlsplit(url)
        return f"{parts.scheme}://{_place(url)}{parts.path}" if parts.scheme else "an address without a scheme"
    except ValueError:
        return "an address that cannot be read"


def holds_login(url: str) -> bool:
    """Whether there is anything in it that may be secret: a user (a password is often written there), a password, a query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "@" in url or "?" in url
    return "@" in parts.netloc or bool(parts.query)


def refuse_login(setting: str, url: str, what_to_do: str) -> None:
    """ConfigError for a setting whose URL holds a login."""
    if holds_login(url):
        raise ConfigError(
            f"{setting} = {shown_url(url)!r} came with a user, a password or a query, which config.toml, logs and `ps` would show. "
            + what_to_do
        )


def without_login(url: str) -> str:
    """The URL that a request is made to; its login goes into a header (`login_of`)."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, _place(url), parts.path, parts.query, parts.fragment))


def login_of(url: str) -> str | None:
    """The Authorization header of a URL with a login; None for one without."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return None
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()


def known_logins() -> dict[str, str]:
    """scheme://host:port → Authorization header, from the environment."""
    found: dict[str, str] = {}
    for url in os.environ.get(LOGINS_VARIABLE, "").split():
        login = login_of(url)
        if login is None or not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"${LOGINS_VARIABLE} holds {shown_url(url)!r}, which has no login; it is a list of URLs such as "
                "http://user:password@host:8000, with spaces between them."
            )
        found[origin_of(url)] = login
    return found


def origin_of(url: str) -> str:
    """scheme://host:port, without the login."""
    return f"{urlsplit(url).scheme}://{_place(url)}"


def _place(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]
