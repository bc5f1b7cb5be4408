"""Publishes a small release in place of a build, by the variables that `cachepipe build` takes: for ci/drill-keys.

python -m tests.support.publish_small NUMBER      into CACHEPIPE_STORE, which must end in `/store`; channel stable, release demo
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cachepipe.adapters.store import TrustChoice
from tests.support.restoring import publish_release

if __name__ == "__main__":
    store = Path(os.environ["CACHEPIPE_STORE"].removeprefix("file://"))
    assert store.name == "store"
    keys = (os.environ.get("CACHEPIPE_STATEMENT_KEY", ""), os.environ.get("CACHEPIPE_INDEX_KEY", ""))
    trust = TrustChoice(os.environ.get("CACHEPIPE_TRUST", ""), False, *keys)
    published = publish_release(store.parent, number=int(sys.argv[1]), trust=trust)
    print(published.row.statement)
