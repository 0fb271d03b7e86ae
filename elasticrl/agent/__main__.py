"""`python -m elasticrl.agent`."""

import sys

from elasticrl.agent.main import main

sys.exit(main())
