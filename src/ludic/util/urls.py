"""Secrets of HTTP: URLs with logins (http://user:password@host), hidden in messages and read from the environment.

Flags, settings, logs, error messages and metrics can be read by others, so they must not contain a login: `shown_url` for
messages, `refuse_login` for settings, `login_of` for requests. Servers compare what a client sent with `is_same_secret`,
and want no secret where `is_loopback`.
"""

import base64
import hmac
import ipaddress
import os
import re
import socket
from urllib.parse import unquote, urlsplit, urlunsplit

from ludic.util.errors import ConfigError

LOGINS_VARIABLE = "LUDIC_HTTP_LOGINS"
"""URLs of HTTP servers with their logins, separated by spaces: http://user:password@host:8000 …"""
PUT_LOGIN = (
    f"Give it without, and put the whole URL into the environment variable {LOGINS_VARIABLE} (several separated by spaces); "
    "a resumed run reads it there again."
)
_SECRET = re.compile("pass|pwd|secret|token|key|auth|user|cred|sig", re.IGNORECASE)
"""In the name of a query parameter."""


def shown_url(url: str) -> str:
    """The address without user, password, query and fragment, all of which may hold keys."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        place = (f"[{host}]" if ":" in host else host) + ("" if parts.port is None else f":{parts.port}")
    except ValueError:
        return "an address that cannot be read"
    if url.count("@") != parts.netloc.count("@"):  # a password with / ? # was parsed as another part
        return "an address that cannot be read"
    return f"{parts.scheme}://{place}{parts.path}" if parts.scheme else "an address without a scheme"


def holds_login(url: str) -> bool:
    """True if it contains something that may be secret: a user (often a password is written there), a password, a key."""
    names = (pair.partition("=")[0] for pair in url.partition("?")[2].split("&"))
    return "@" in url or any(_SECRET.search(name) and not name.endswith(("file", "certs")) for name in names)


def refuse_login(setting: str, url: str, what_to_do: str) -> None:
    """ConfigError for a setting whose URL holds a login."""
    if holds_login(url):
        raise ConfigError(
            f"{setting} = {shown_url(url)!r} came with a user, a password or a key, which config.toml, logs and `ps` would show. "
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
                "http://user:password@host:8000, separated by spaces."
            )
        found[origin_of(url)] = login
    return found


def origin_of(url: str) -> str:
    """scheme://host:port, without the login."""
    return f"{urlsplit(url).scheme}://{_place(url)}"


def is_same_secret(given: str | bytes, wanted: str | bytes) -> bool:
    """True if both are the same bytes, compared in constant time. A client may send any text: nothing raises."""
    one, other = (each if isinstance(each, bytes) else each.encode(errors="surrogatepass") for each in (given, wanted))
    return hmac.compare_digest(one, other)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach a server that listens on `host`."""
    try:
        if host == "localhost":  # /etc/hosts can point it anywhere
            places = [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
            return all(ipaddress.ip_address(place).is_loopback for place in places)
        return ipaddress.ip_address(host).is_loopback
    except (ValueError, OSError):  # another host name may point anywhere
        return False


def _place(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]
