"""``python -m farandole.runner`` is ``farandolerun``."""

import sys

from farandole.runner.cli import main

sys.exit(main())
