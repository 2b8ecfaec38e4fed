"""``python -m farandole.run`` is ``farandolerun``."""

import sys

from farandole.run.main import main

sys.exit(main())
