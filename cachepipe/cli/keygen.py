"""`keygen`: signing keys, and the trust policy that lists their public halves."""

from __future__ import annotations

from pathlib import Path

import click

from cachepipe.cli.options import NEW_FILE, json_option, option
from cachepipe.cli.output import print_json, print_line, say
from cachepipe.errors import UsageError
from cachepipe.workflows import keygen as keys

EPILOG = """\b
Examples:
  cachepipe keygen --role statement --key statement.key --policy trust.json
  cachepipe keygen --role index --key kms:alias/cachepipe-index --policy trust.json
  cachepipe keygen --policy trust.json --retire 3f0c9a1b

The policy goes into images, at /etc/cachepipe/trust.json; a private key stays where it signs. An alias that KMS does not know
yet is made there."""


@click.command("keygen", epilog=EPILOG)
@option("--key", metavar="KEY", help="FILE (made 0600 if it does not exist) or kms:alias/…")
@option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice(["statement", "index"]),
    help="What it may sign; may be repeated.",
)
@option("--policy", type=NEW_FILE, default="trust.json", show_default=True, metavar="FILE", help="Trust policy.")
@option("--not-after", default="", metavar="TIME", help="When it ends: 2027-03-01T00:00:00Z. [default: never]")
@option("--retire", metavar="KEYID", help="Take this key out of the policy instead; 8 digits or more.")
@json_option
def keygen_command(
    key: str | None, roles: tuple[str, ...], policy: Path, not_after: str, retire: str | None, is_json: bool
) -> None:
    """Makes a signing key, or takes one out of use, and writes the trust policy."""
    if key is not None and retire is None:
        found = keys.keygen(keys.KeyRequest(key, roles, policy, not_after))
    elif retire is not None and key is None:
        found = keys.retire(policy, retire)
    else:
        raise UsageError("say which key: `--key` or `--retire`", hint="see `cachepipe keygen --help`")
    if is_json:
        print_json(found)
        return
    print_line(found.keyid)
    what = "retired from" if retire else f"may sign {' and '.join(found.roles)} by"
    say(f"{what} {policy}{f', until {not_after}' if not_after and not retire else ''}")
