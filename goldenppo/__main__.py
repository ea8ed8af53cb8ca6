"""`python -m goldenppo` is the command `goldenppo`."""

import sys

from goldenppo.conformance.cli import main

sys.exit(main())
