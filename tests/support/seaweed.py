"""A real S3 server on loopback: SeaweedFS (`weed mini`), started once per test run and ended by its process id.

The processes of a run share it (`shared`). A keeper, its parent, ends it when the last of them has ended, in whatever way: each
holds a shared lock on one file, and the keeper waits for the exclusive one.

Two listeners of one server: http, and https with a certificate of our own authority. Telemetry is off, everything is bound
to 127.0.0.1, all ten ports are free ones, so that several runs stand beside each other.
"""

from __future__ import annotations

import ctypes
import datetime
import fcntl
import http.client
import ipaddress
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

REPOSITORY = Path(__file__).resolve().parents[2]
REGION = "us-east-1"
_LIBC = ctypes.CDLL(None)
S3_BUCKET = "cachepipe"
ADMIN = ("testadmin", "testadminsecret")
READER = ("testreader", "testreadersecret")
"""May read objects of the bucket, and neither list nor write."""


@dataclass(frozen=True)
class Seaweed:
    """A server; the bucket `S3_BUCKET` is there."""

    folder: Path
    ports: tuple[int, ...]
    """S3 over http, S3 over https, and four for itself."""

    @property
    def ca_bundle(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    @property
    def tls_endpoint(self) -> str:
        return f"https://localhost:{self.ports[1]}"


@dataclass(frozen=True)
class Running(Seaweed):
    """A server of this process."""

    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """Ends the server at once: it takes seconds to end by itself, and nobody needs its data."""
        _kill(self.process, self.ports)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def shared(folder: Path) -> Iterator[Seaweed]:
    """Gives the server of all processes that name this folder; the first of them starts it.

    Args:
        folder: of one test run, on a local file system; made if it is absent.
    """
    folder.mkdir(exist_ok=True)
    with (folder / "users").open("a") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        with (folder / "starting").open("a") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            server = _recorded(folder) or _start_keeper(folder)
        yield server


def _recorded(folder: Path) -> Seaweed | None:
    """Returns the server that runs for a folder; None: none was started, or its keeper was killed and it with it."""
    record = folder / "server.json"
    if not record.exists():
        return None
    told = json.loads(record.read_text())
    server = Seaweed(Path(told["folder"]), tuple(told["ports"]))
    return server if _is_up(server) else None


def _start_keeper(folder: Path) -> Seaweed:
    command = [sys.executable, "-c", "from tests.support.seaweed import keep; keep()", str(folder)]
    with (folder / "log").open("wb") as log:
        keeper = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert keeper.stdout is not None
    with keeper.stdout as told:
        told.readline()  # it is ready, or has ended
    server = _recorded(folder)
    if server is None:
        raise RuntimeError(f"the keeper of SeaweedFS failed:\n{(folder / 'log').read_text()[-4000:]}")
    return server


def keep() -> None:
    """Starts a server, and ends it when nobody uses it any more; a process of its own."""
    folder = Path(sys.argv[1])
    record = folder / "server.json"
    with (folder / "users").open("a") as users:
        server = start()
        try:
            temporary = record.with_suffix(".tmp")
            temporary.write_text(json.dumps({"folder": str(server.folder), "ports": server.ports}))
            temporary.replace(record)
            print("ready", flush=True)
            fcntl.flock(users, fcntl.LOCK_EX)
            record.unlink(missing_ok=True)  # who comes now waits for the lock, and starts another
        finally:
            server.stop()


def start(limit_s: float = 60.0) -> Running:
    """Returns a server that answers, with an empty bucket."""
    weed = Path(sys.executable).with_name("weed")
    folder = Path(tempfile.mkdtemp(prefix="seaweed."))
    _write_identities(folder)
    _write_certificates(folder)
    for _ in range(5):  # another process may take a port between our look and the server's bind
        ports = _free_ports()
        process = _spawn(weed, folder, ports)
        server = Running(folder, ports, process)
        if _answers(server, time.monotonic() + limit_s):
            _make_bucket(server)
            return server
        _kill(process, ports)
        shutil.rmtree(folder / "data", ignore_errors=True)
    log = (folder / "log").read_text(errors="replace")[-2000:]
    shutil.rmtree(folder, ignore_errors=True)
    raise RuntimeError(f"SeaweedFS does not start:\n{log}")


def _spawn(weed: Path, folder: Path, ports: tuple[int, ...]) -> subprocess.Popen[bytes]:
    s3, tls, master, volume, filer, admin = ports[:6]
    (folder / "data").mkdir(exist_ok=True)
    command = [
        str(weed), "-logtostderr=true", "mini",
        f"-dir={folder}/data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        "-master.telemetry=false", "-webdav=false", "-admin.ui=false",
        "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false", "-s3.iam=false",
        f"-s3.config={folder}/identities.json",
        f"-s3.port={s3}", f"-s3.port.https={tls}",
        f"-s3.cert.file={folder}/server.pem", f"-s3.key.file={folder}/server.key",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-admin.port={admin}",
    ]  # fmt: skip
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": str(folder)},
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - one call into libc, which is loaded
        )


def _die_with_parent() -> None:
    """Asks Linux to end this process when the test run is killed: PR_SET_PDEATHSIG."""
    _LIBC.prctl(1, signal.SIGKILL)


def _kill(process: subprocess.Popen[bytes], ports: tuple[int, ...]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for port in ports:  # SeaweedFS 4.48 puts its sockets there, whatever TMPDIR says
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)
        for path in Path("/tmp").glob(f"seaweedfs-*-grpc-{port + 10_000}.sock"):
            path.unlink(missing_ok=True)


def _free_ports() -> tuple[int, ...]:
    """Returns six ports that are free together with those 10,000 above them, which the server takes for gRPC."""
    found: list[int] = []
    while len(found) < 6:
        port = random.SystemRandom().randrange(11_000, 22_000)
        if port not in found and all(_is_free(number) for number in (port, port + 10_000)):
            found.append(port)
    return tuple(found)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _answers(server: Running, deadline: float) -> bool:
    while time.monotonic() < deadline and server.process.poll() is None:
        if _is_up(server):
            return True
        time.sleep(0.05)
    return False


def _is_up(server: Seaweed) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[0], timeout=2)
    try:
        connection.request("GET", "/status")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _make_bucket(server: Running) -> None:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name=REGION,
        aws_access_key_id=ADMIN[0],
        aws_secret_access_key=ADMIN[1],
        config=Config(retries={"mode": "standard", "total_max_attempts": 8}, s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=S3_BUCKET)
    client.put_object(Bucket=S3_BUCKET, Key="ready", Body=b"x")
    client.delete_object(Bucket=S3_BUCKET, Key="ready")


def _write_identities(folder: Path) -> None:
    def identity(name: str, keys: tuple[str, str], actions: list[str]) -> dict[str, object]:
        return {"name": name, "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}], "actions": actions}

    identities = [
        identity("admin", ADMIN, ["Admin", "Read", "List", "Tagging", "Write"]),
        identity("reader", READER, [f"Read:{S3_BUCKET}"]),
    ]
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))


def _write_certificates(folder: Path) -> None:
    """Writes an authority and a certificate for localhost."""
    now = datetime.datetime.now(datetime.timezone.utc)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cachepipe tests")])
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])

    def certificate(subject: x509.Name, public: ec.EllipticCurvePublicKey, is_ca: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(ca_name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if not is_ca:
            names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(ca_key, hashes.SHA256())

    pem = serialization.Encoding.PEM
    (folder / "ca.pem").write_bytes(certificate(ca_name, ca_key.public_key(), True).public_bytes(pem))
    (folder / "server.pem").write_bytes(certificate(name, key.public_key(), False).public_bytes(pem))
    (folder / "server.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
