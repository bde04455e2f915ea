"""Certificates, renewed while served. Those in tests/fixtures/tls are self-signed for localhost and good for a hundred years,
first and second with ECDSA keys."""

import asyncio
import contextlib
import shutil
import ssl
from pathlib import Path

import pytest

from router.access.tls import Certificate, certificate_of
from schemas.settings import SettingsError

TLS = Path(__file__).parents[2] / "fixtures" / "tls"


@pytest.fixture
def files(tmp_path):
    put(tmp_path, "first")
    return tmp_path / "cert.pem", tmp_path / "cert.key"


def put(folder, name, key=None):
    shutil.copy(TLS / f"{name}.pem", folder / "cert.pem")
    shutil.copy(TLS / f"{key or name}.key", folder / "cert.key")


def common_name(certificate: Certificate, version: ssl.TLSVersion | None = None, server_name: str | None = "localhost") -> str:
    """Whom a client meets: a handshake in memory."""
    wire = [ssl.MemoryBIO() for _ in range(4)]
    client_context = ssl.create_default_context()
    for name in ("first", "second", "rsa"):
        client_context.load_verify_locations(TLS / f"{name}.pem")
    if version is not None:
        client_context.minimum_version = client_context.maximum_version = version
    client_context.check_hostname = server_name is not None
    client = client_context.wrap_bio(wire[0], wire[1], server_hostname=server_name)
    server = certificate.context.wrap_bio(wire[2], wire[3], server_side=True)
    done = False
    while not done:
        done = True
        for side, out, into in ((client, wire[1], wire[2]), (server, wire[3], wire[0])):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            into.write(out.read())
    return dict(part[0] for part in client.getpeercert()["subject"])["commonName"]


def test_a_client_meets_the_certificate(files):
    assert common_name(Certificate(*files)) == "first"
    assert common_name(Certificate(*files), ssl.TLSVersion.TLSv1_2) == "first"


def test_older_than_tls_1_2_is_not_spoken(files):
    assert Certificate(*files).context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("version", [None, ssl.TLSVersion.TLSv1_2])
def test_a_reload_changes_whom_new_clients_meet_whatever_the_kind_of_key(files, version):
    certificate = Certificate(*files)
    for name in ("second", "rsa", "first", "rsa"):
        put(files[0].parent, name)
        certificate.reload()
        assert common_name(certificate, version) == name


def test_a_client_that_names_no_server_meets_the_new_certificate_too(files):
    certificate = Certificate(*files)
    put(files[0].parent, "second")
    certificate.reload()
    assert common_name(certificate, server_name=None) == "second"


def test_a_reload_of_a_pair_that_does_not_fit_changes_nothing(files):
    certificate = Certificate(*files)
    put(files[0].parent, "second", key="first")
    with pytest.raises(SettingsError, match="not the key of the certificate"):
        certificate.reload()
    assert common_name(certificate) == "first"


async def test_files_are_followed_past_a_pair_that_does_not_fit(files):
    certificate = Certificate(*files)
    task = asyncio.create_task(certificate.follow(0.01))
    put(files[0].parent, "second", key="first")
    while certificate.trouble is None:  # noqa: ASYNC110 - the suite's time-out is the deadline
        await asyncio.sleep(0.005)
    assert common_name(certificate) == "first"
    put(files[0].parent, "second")
    while certificate.trouble is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert common_name(certificate) == "second"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_reload_that_failed_is_tried_again_and_told_once(files, monkeypatch, caplog):
    certificate = Certificate(*files)
    tried = 0

    def unreadable():
        nonlocal tried
        tried += 1
        raise SettingsError("cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(certificate, "reload", unreadable)
        task = asyncio.create_task(certificate.follow(0.01))
        put(files[0].parent, "second")
        while tried < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    while certificate.trouble is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    assert common_name(certificate) == "second"
    assert caplog.text.count("cannot be read") == 1
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize(
    ("cert", "key", "complaint"),
    [
        ("none.pem", "first.key", "`tls_cert_file`.*cannot be read"),
        ("first.pem", "none.key", "`tls_key_file`.*cannot be read"),
        ("first.pem", "second.key", "`tls_key_file`.*not the key of the certificate"),
        ("first.pem", "first-encrypted.key", "`tls_key_file`.*passphrase"),
        ("first.key", "first.key", "`tls_cert_file`.*PEM"),
    ],
)
def test_files_that_are_not_to_be_used_are_named(cert, key, complaint):
    with pytest.raises(SettingsError, match=complaint):
        Certificate(TLS / cert, TLS / key)


def test_one_file_without_the_other_is_named(files):
    assert certificate_of(None, None) is None
    with pytest.raises(SettingsError, match="`tls_key_file`"):
        certificate_of(files[0], None)
    with pytest.raises(SettingsError, match="`tls_cert_file`"):
        certificate_of(None, files[1])
