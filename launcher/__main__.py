"""`python -m launcher` is `launcher`."""

import sys

from launcher.commands.main import main

sys.exit(main())
