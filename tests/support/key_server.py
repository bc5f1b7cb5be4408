"""A server that gives keys in every way that AWS does: instance, container, agent of a pod, security token service.

    with KeyServer() as server:
        os.environ |= server.environment("container")

The access key says who gave it; a request without the token that its way demands gets 401. Over https with a certificate of
the caller's: obstore gives a token to no other address.
"""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

TOKEN = "web-identity-or-agent-token"
ROLE = "arn:aws:iam::123456789012:role/service"
ENDS = "2099-01-01T00:00:00Z"


class KeyServer:
    """Listens on loopback from `with` on.

    Args:
        folder: for the file that holds the token.
        certificate: files of certificate and key for `localhost`; None: http.
    """

    def __init__(self, folder: Path, certificate: tuple[Path, Path] | None = None) -> None:
        self.token_file = folder / "token"
        self.token_file.write_text(TOKEN)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if certificate else 'http'}://localhost:{self._server.server_port}"

    def __enter__(self) -> KeyServer:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self._answer(200 if self.path == "/latest/api/token" else 404, "metadata-token")

    def do_GET(self) -> None:
        role = "/latest/meta-data/iam/security-credentials/"
        if self.path.startswith(role) and self.headers["X-aws-ec2-metadata-token"] != "metadata-token":
            self._answer(401, "")
        elif self.path == role:
            self._answer(200, "service")
        elif self.path == f"{role}service":
            self._answer(200, _keys("INSTANCE"))
        elif self.path == "/container":
            self._answer(200, _keys("CONTAINER"))
        elif self.path == "/agent":
            self._answer(200 if self.headers["Authorization"] == TOKEN else 401, _keys("AGENT"))
        else:
            self._answer(404, "")

    def do_POST(self) -> None:
        _, _, query = self.path.partition("?")  # boto3 sends a form, obstore a query
        asked = parse_qs(query or self.rfile.read(int(self.headers["Content-Length"] or 0)).decode())
        is_ours = asked.get("WebIdentityToken") == [TOKEN] and asked.get("RoleArn") == [ROLE]
        self._answer(200 if is_ours else 403, _STS)

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def _keys(who: str) -> str:
    keys = {"AccessKeyId": who, "SecretAccessKey": "secret", "Token": f"of {who}", "Expiration": ENDS}
    return json.dumps({"Code": "Success", "Type": "AWS-HMAC", "LastUpdated": "2020-01-01T00:00:00Z", **keys})


_STS = f"""<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>WEBIDENTITY</AccessKeyId><SecretAccessKey>secret</SecretAccessKey>
<SessionToken>of WEBIDENTITY</SessionToken><Expiration>{ENDS}</Expiration></Credentials>
<AssumedRoleUser><Arn>{ROLE}/x</Arn><AssumedRoleId>A:x</AssumedRoleId></AssumedRoleUser>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
