"""The store in a build's work folder, from which an artifact is proved before anything is published.

It has a development key and a policy of its own: what is not proved yet is never signed with the release's keys, and
the trust policy of the machine says nothing about it.
"""

from __future__ import annotations

from pathlib import Path

from cachepipe.adapters.dev_keys import dev_key, dev_policy
from cachepipe.adapters.store import Store, TrustChoice, open_store
from cachepipe.adapters.workdir import WorkDir, write_whole
from cachepipe.domain.policy import policy_bytes

POLICY = "stage-trust.json"


def open_stage(work: WorkDir) -> tuple[Store, Path]:
    """Returns an empty staged store, and the policy file by which a restore accepts what it holds."""
    from cachepipe.adapters.signer import generate

    root = work.empty("stage")
    dev_key(str(root), generate)
    policy = work.path / POLICY
    write_whole(policy, policy_bytes(dev_policy(str(root))))
    policy.chmod(0o600)
    return open_store(f"file://{root}", TrustChoice(policy_file=str(policy))), policy
