"""`python -m cachepipe` is the same command as `cachepipe`."""

from __future__ import annotations

import sys

from cachepipe.entrypoint import main

sys.exit(main())
