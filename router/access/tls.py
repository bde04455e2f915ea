"""TLS of the router's own port, whose certificate can be renewed while it serves.

A certificate that was replaced on disk gets a context of its own, to which the listening one hands each new connection. Rejected: loading
it into the listening context, which keeps one certificate of each kind of key (one renewed from ECDSA to RSA would never be shown), and is
left without either when certificate and key do not belong together. Connections that stand keep what they were opened with.

TLS 1.2 and newer. No client certificates: callers are told by their keys. A key file with a passphrase is refused, for nobody is there to
type it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from router.access.watched import Watched
from schemas.settings import SettingsError

log = logging.getLogger(__name__)


class _Encrypted(Exception):  # noqa: N818 - a value, named for what it is
    pass


class Certificate:
    """Raises SettingsError when the files are not to be used."""

    def __init__(self, cert_file: Path, key_file: Path) -> None:
        self.cert_file, self.key_file = cert_file, key_file
        self._watched = Watched([cert_file, key_file])
        self.trouble: str | None = None
        self.context = self._newest = _context(cert_file, key_file)
        self.context.sni_callback = self._hand_on

    def reload(self) -> None:
        """New connections get what the files hold now. Raises SettingsError, and then nothing has changed."""
        self._newest = _context(self.cert_file, self.key_file)

    def _hand_on(self, connection: ssl.SSLObject | ssl.SSLSocket, server_name: str | None, listening: ssl.SSLContext) -> None:
        """OpenSSL calls it in each handshake, whether or not the client names a server."""
        connection.context = self._newest

    async def follow(self, every_s: float = 1.0) -> None:
        """Until cancelled: reloads when the files change. While they are not to be used, what was read before serves on, and they are tried
        again: what was wrong may be their rights. The two are seldom replaced at one moment: between them they do not fit, which is said,
        and passes."""
        while True:
            await asyncio.sleep(every_s)
            if not self._watched.changed() and self.trouble is None:
                continue
            try:
                self.reload()
            except Exception as e:  # the top of this task's loop: whatever the files hold, the old certificate serves on
                before, self.trouble = self.trouble, f"the certificate that was read before serves on: {e}"
                if self.trouble != before:
                    log.error("%s", self.trouble)
                continue
            self.trouble = None
            log.info("the certificate in %s was read anew", self.cert_file)


def certificate_of(cert_file: Path | None, key_file: Path | None) -> Certificate | None:
    """None: plain HTTP. Raises SettingsError when only one of the two is given."""
    if cert_file is None and key_file is None:
        return None
    if cert_file is None or key_file is None:
        missing = "tls_cert_file" if cert_file is None else "tls_key_file"
        raise SettingsError(f"setting `{missing}`: TLS needs both tls_cert_file and tls_key_file")
    return Certificate(cert_file, key_file)


def _context(cert_file: Path, key_file: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    _load(context, cert_file, key_file)
    return context


def _load(context: ssl.SSLContext, cert_file: Path, key_file: Path) -> None:
    for path, setting in ((cert_file, "tls_cert_file"), (key_file, "tls_key_file")):
        try:
            with path.open("rb"):
                pass
        except OSError as e:
            raise SettingsError(f"setting `{setting}`: {path} cannot be read: {e.strerror}") from e
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_passphrase)
    except _Encrypted:
        raise SettingsError(
            f"setting `tls_key_file`: {key_file} needs a passphrase; give one without (openssl pkey -in OLD -out NEW)"
        ) from None
    except ssl.SSLError as e:
        if e.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"setting `tls_key_file`: {key_file} is not the key of the certificate in {cert_file}") from e
        raise SettingsError(
            f"settings `tls_cert_file`, `tls_key_file`: {cert_file} must hold the certificate and its chain, {key_file} its private key, "
            f"both as PEM ({e.reason or 'no PEM'})"
        ) from e


def _no_passphrase() -> str:
    raise _Encrypted
